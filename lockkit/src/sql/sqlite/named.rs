//! Named locks on SQLite.

use sqlx::{Sqlite, SqliteConnection};

use super::take_write_lock;
use crate::{
    policy::Wait,
    sql::{Granted, NamedStatements, Names, Sharing},
    value::{holder::LockHolder, key::Key},
};

/// Changes nothing, under the write lock.
const LOCK: &str = "DELETE FROM lockkit_lease WHERE 0";

impl NamedStatements for Sqlite {
    async fn named_lock(
        conn: &mut SqliteConnection,
        _of: Names,
        _key: &Key,
        _sharing: Sharing,
        wait: Wait,
    ) -> sqlx::Result<Option<Granted>> {
        take_write_lock(conn, wait, LOCK.to_owned()).await?;
        Ok(Some(Granted::Known))
    }

    fn named_ends(_of: Names, _sharing: Sharing, _wait: Wait) -> bool {
        true
    }

    fn named_text(_of: Names, _key: &Key, _sharing: Sharing, _wait: Wait) -> String {
        // The busy timeout of the connection cannot be restored by a statement.
        LOCK.to_owned()
    }

    async fn named_feigned(_conn: &mut SqliteConnection, _of: Names, _key: &Key) -> sqlx::Result<Option<String>> {
        Ok(None)
    }

    async fn named_holder(_conn: &mut SqliteConnection, _of: Names, _key: &Key) -> sqlx::Result<Option<LockHolder>> {
        Ok(None)
    }
}
