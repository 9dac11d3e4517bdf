//! Versions and retries, dropped at every await.

use lockkit::{Error, RetryPolicy, VersionedRow, VersionedStruct};
use support::{TestDb, on_every_database};

use super::{Bench, nothing};

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "item", key = "id")]
struct Item {
    id: i64,
    stock: i64,
    version: i64,
}

on_every_database! {
    async fn versions_and_retries_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { pool, .. } = &bench;
        let item = || VersionedRow::table("item").by("id", 1_i64);

        let read = async || {
            let mut conn = pool.acquire().await.unwrap();
            (async move { item().read::<(i64, i64, i64)>(&mut *conn).await }, ())
        };
        bench.drop_everywhere("VersionedRow::read", read, nothing).await;
        let bump = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            let version = item().read::<()>(&mut *tx).await.unwrap().version;
            (async move { item().expected(version).bump(&mut *tx).await }, ())
        };
        bench.drop_everywhere("VersionedRow::bump", bump, nothing).await;

        let load = async || (Item::load(pool, 1), ());
        bench.drop_everywhere("a derived load", load, nothing).await;

        let save = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            (async move { item.save(pool).await.map(drop) }, ())
        };
        bench.drop_everywhere("a derived save", save, nothing).await;

        let save_by_trait = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            (async move { VersionedStruct::save(&mut item, pool).await.map(drop) }, ())
        };
        bench.drop_everywhere("VersionedStruct::save", save_by_trait, nothing).await;

        let save_in_tx = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { item.save(&mut *tx).await.map(drop) }, ())
        };
        bench.drop_everywhere(("a derived save", "in a transaction"), save_in_tx, nothing).await;

        let commit = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let tx = lockkit::begin(pool).await.unwrap();
            let saved = async move {
                let mut tx = tx;
                let saved = item.save(&mut *tx).await?;
                saved.commit(tx).await
            };
            (saved, ())
        };
        bench.drop_everywhere("Saved::commit", commit, nothing).await;

        let save_again = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            let again = async move {
                let mut saved = item.save(&mut *tx).await?;
                saved.stock += 1;
                saved.save(&mut *tx).await.map(drop)
            };
            (again, ())
        };
        bench.drop_everywhere("Saved::save", save_again, nothing).await;

        let delete = async || {
            let item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { item.delete(&mut *tx).await }, ())
        };
        bench.drop_everywhere(("a derived delete", "in a transaction"), delete, nothing).await;

        let delete_by_trait = async || {
            let item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { VersionedStruct::delete(&item, &mut *tx).await }, ())
        };
        bench.drop_everywhere("VersionedStruct::delete", delete_by_trait, nothing).await;

        let delete_saved = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            let delete = async move {
                let saved = item.save(&mut *tx).await?;
                saved.delete(&mut *tx).await.map(drop)
            };
            (delete, ())
        };
        bench.drop_everywhere("Saved::delete", delete_saved, nothing).await;

        let delete_row = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            let version = item().read::<()>(&mut *tx).await.unwrap().version;
            (async move { item().expected(version).delete(&mut *tx).await }, ())
        };
        bench.drop_everywhere("VersionedRow::delete", delete_row, nothing).await;

        let commit_bump = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            let version = item().read::<()>(&mut *tx).await.unwrap().version;
            let bumped = item().expected(version).bump(&mut *tx).await.unwrap();
            (bumped.commit(tx), ())
        };
        bench.drop_everywhere("Bumped::commit", commit_bump, nothing).await;

        let attempt = async |number| {
            let mut tx = lockkit::begin(pool).await?;
            let version = item().read::<()>(&mut *tx).await?.version;
            // The first attempt makes a conflict of its own, so that the next one has the turn.
            item().expected(version.clone()).bump(&mut *tx).await?;
            if number == 1 {
                item().expected(version).bump(&mut *tx).await?;
            }
            tx.commit().await
        };
        let policy = || RetryPolicy::new().attempts(3);
        bench.drop_everywhere("RetryPolicy::retry", async || (policy().retry(attempt), ()), nothing).await;
        let retry_if = async || (policy().retry_if(Error::is_conflict, attempt), ());
        bench.drop_everywhere("RetryPolicy::retry_if", retry_if, nothing).await;
    }
}
