//! Users of a server who have only the rights that a test gives them.

use url::Url;

use crate::{Backend, TestDb};

/// A user of a test's database, without any rights on it at first. On `PostgreSQL`, nobody but the owner may then make
/// tables in it.
#[derive(Debug)]
pub struct User {
    pub name: String,
    /// The database of the test, as this user.
    pub url: String,
}

impl User {
    /// Makes a user. [`User::delete`] must be called in the end: users outlive a test's database.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn new<S: Backend>(db: &TestDb<S>) -> Self {
        let mut url = Url::parse(&db.url).expect("a URL made by TestDb");
        let name = format!("u{}", db.name().trim_start_matches("lockkit_"));
        match S::NAME {
            "PostgreSQL" => {
                let sql =
                    format!("CREATE ROLE {name} LOGIN PASSWORD 'secret'; REVOKE CREATE ON SCHEMA public FROM PUBLIC");
                db.execute(&sql).await
            }
            _ => db.execute(&format!("CREATE USER {name} IDENTIFIED BY 'secret'")).await,
        };
        url.set_username(&name).expect("a URL with a host");
        url.set_password(Some("secret")).expect("a URL with a host");
        Self { name, url: url.into() }
    }

    /// Deletes the user, who must not be connected any more.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn delete<S: Backend>(self, db: &TestDb<S>) {
        let Self { name, .. } = self;
        match S::NAME {
            "PostgreSQL" => db.execute(&format!("DROP OWNED BY {name}; DROP ROLE {name}")).await,
            _ => db.execute(&format!("DROP USER {name}")).await,
        };
    }
}
