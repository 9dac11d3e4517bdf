//! `test-beat FILE`: writes the time into the file, in microseconds since 1970, every 2 ms for as long as it lives.

use std::{
    env,
    fs::File,
    os::unix::fs::FileExt,
    thread::sleep,
    time::{Duration, SystemTime},
};

fn main() {
    let path = env::args_os().nth(1).expect("usage: test-beat FILE");
    let file = File::create(path).expect("make the file");
    loop {
        let now = SystemTime::UNIX_EPOCH.elapsed().expect("it is later than 1970").as_micros();
        // One write, so that a reader sees all of it.
        file.write_all_at(format!("{now}\n").as_bytes(), 0).expect("write");
        sleep(Duration::from_millis(2));
    }
}
