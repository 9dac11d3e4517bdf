//! Named locks on SQLite.

use sqlx::{Sqlite, SqliteConnection};

use super::take_write_lock;
use crate::{
    policy::Wait,
    sql::{Granted, NamedStatements, Names, Sharing},
    value::{holder::LockHolder, key::Key},
};

impl NamedStatements for Sqlite {
    async fn named_lock(
        conn: &mut SqliteConnection,
        _of: Names,
        _key: &Key,
        _sharing: Sharing,
        wait: Wait,
    ) -> sqlx::Result<Option<Granted>> {
        take_write_lock(conn, wait, "DELETE FROM lockkit_lease WHERE 0".to_owned()).await?;
        Ok(Some(Granted::Known))
    }

    async fn named_feigned(_conn: &mut SqliteConnection, _of: Names, _key: &Key) -> sqlx::Result<Option<String>> {
        Ok(None)
    }

    async fn named_holder(_conn: &mut SqliteConnection, _of: Names, _key: &Key) -> sqlx::Result<Option<LockHolder>> {
        Ok(None)
    }
}
