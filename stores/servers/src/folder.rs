//! A folder that is gone when its process is.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// A new folder for the data of a server. It is deleted when this is dropped, and also when the process ends without
/// dropping it, as a test's process does with what its tests share.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    broom: Child,
}

/// Waits until the process that started it closes the pipe, or ends. Servers die with that process, at the same moment.
const BROOM: &str = r#"trap "" HUP INT TERM; cat >/dev/null; until rm -rf "$0"; do sleep 0.1; done"#;

impl Folder {
    /// Creates a folder.
    ///
    /// # Panics
    /// If that is not possible.
    #[expect(clippy::new_without_default, reason = "it creates a folder")]
    pub fn new() -> Self {
        let path = tempfile::tempdir_in(folder_for_data()).expect("create a folder").keep();
        let broom = Command::new("sh")
            .args(["-c", BROOM])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("start sh");
        Self { path, broom }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(self.broom.stdin.take());
        let _ = self.broom.wait();
    }
}

/// Where servers keep their data: in memory if there is room. On a slow disk `PostgreSQL` takes up to 0.2 s to make a
/// database, for 0.02 s in memory, and etcd and `ZooKeeper` lose their leader.
///
/// Never the build folder, which the user that `PostgreSQL` runs as may not be able to enter.
pub fn folder_for_data() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let df = Command::new("df").args(["-k", "--output=avail"]).arg(&memory).output();
    let available =
        df.ok().and_then(|df| String::from_utf8_lossy(&df.stdout).lines().nth(1)?.trim().parse::<u64>().ok());
    if available >= Some(2_000_000) { memory } else { env::temp_dir() }
}
