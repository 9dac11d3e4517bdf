//! `lockkit`'s migrations as files, and what a database says of those that were applied.

use std::fs;
use std::path::{Path, PathBuf};

use lockkit::Leases;
use sqlx::{Database, Pool};

use crate::{Backend, TestDb};

/// The root of the repository.
///
/// # Panics
/// Never.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in a folder of the repository")
}

/// The folder of the migrations for this kind of database, from the root of the repository.
pub fn folder<S: Backend>() -> PathBuf {
    Path::new("migrations").join(<S::DB as Database>::URL_SCHEMES[0])
}

/// The files in it, in their order.
///
/// # Panics
/// If the folder cannot be read.
pub fn files<S: Backend>() -> Vec<PathBuf> {
    let folder = repository().join(folder::<S>());
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("read the folder").map(|it| it.expect("read the folder").path()).collect();
    files.sort();
    files
}

/// Runs these migrations without writing them down.
///
/// # Panics
/// If one of them fails.
pub async fn apply_by_hand<S: Backend>(db: &TestDb<S>, files: impl IntoIterator<Item = PathBuf>) {
    for file in files {
        db.execute(&fs::read_to_string(file).expect("read the migration")).await;
    }
}

/// How long all migrations took, to the nanosecond: applying one of them anew makes another number.
///
/// # Panics
/// If not all migrations were applied.
pub async fn history<S: Backend>(db: &TestDb<S>) -> Option<i64> {
    let applied = db.fetch_i64("SELECT COUNT(*) FROM _lockkit_migrations").await;
    assert_eq!(applied, i64::try_from(files::<S>().len()).ok());
    db.fetch_i64("SELECT SUM(execution_time) FROM _lockkit_migrations").await
}

/// Acquires a lease and releases it.
///
/// # Panics
/// If that fails.
pub async fn assert_leases_work<S: Backend>(pool: &Pool<S::DB>) {
    Leases::new(pool.clone()).lease("k").acquire().await.expect("acquire").release().await.expect("release");
}
