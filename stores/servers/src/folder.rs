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
        let path = tempfile::tempdir_in(place()).expect("create a folder").keep();
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

/// In memory if there is room: etcd and `ZooKeeper` wait for the disk at each write, and a slow one costs them their
/// leader.
fn place() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let df = Command::new("df").args(["-k", "--output=avail"]).arg(&memory).output();
    let available =
        df.ok().and_then(|df| String::from_utf8_lossy(&df.stdout).lines().nth(1)?.trim().parse::<u64>().ok());
    if available >= Some(4_000_000) { memory } else { env::temp_dir() }
}
