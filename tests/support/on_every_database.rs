//! Macros that write a test for every kind of database from one body.

/// Writes the tests `name::sqlite`, `name::postgres`, `name::mariadb` and `name::mysql` for each function.
///
/// ```text
/// on_every_database! {
///     async fn a_row_that_was_written_can_be_read<S>(db: TestDb<S>) {
///         db.execute("CREATE TABLE number (n INT)").await;
///     }
/// }
/// ```
#[macro_export]
macro_rules! on_every_database {
    ($($function:tt)*) => { $crate::on_databases! { [sqlite, postgres, mariadb, mysql] $($function)* } };
}

/// Like [`on_every_database!`], without `SQLite`.
#[macro_export]
macro_rules! on_every_server {
    ($($function:tt)*) => { $crate::on_databases! { [postgres, mariadb, mysql] $($function)* } };
}

/// Like [`on_every_database!`], for the databases in brackets: `on_databases! { [postgres, mysql] async fn … }`.
///
/// The body is compiled for each database by itself, with `S` naming the [`Server`](crate::Server), so it may use what
/// holds for a concrete database without bounds that say so.
#[macro_export]
macro_rules! on_databases {
    ([$($database:ident),+]) => {};
    (
        $databases:tt
        $(#[$meta:meta])*
        async fn $name:ident<$server:ident>($db:ident: $db_type:ty) $body:block
        $($rest:tt)*
    ) => {
        $(#[$meta])*
        mod $name {
            use super::*;

            $crate::tests_on! { $databases $server $db $db_type $body }
        }

        $crate::on_databases! { $databases $($rest)* }
    };
}

/// The tests in the module that [`on_databases!`] made, one for each database.
#[doc(hidden)]
#[macro_export]
macro_rules! tests_on {
    ([] $($body:tt)*) => {};
    ([sqlite $(, $more:ident)*] $($body:tt)*) => {
        $crate::test_on!(sqlite Sqlite $($body)*);
        $crate::tests_on!([$($more),*] $($body)*);
    };
    ([postgres $(, $more:ident)*] $($body:tt)*) => {
        $crate::test_on!(postgres Postgres $($body)*);
        $crate::tests_on!([$($more),*] $($body)*);
    };
    ([mariadb $(, $more:ident)*] $($body:tt)*) => {
        $crate::test_on!(mariadb MariaDb $($body)*);
        $crate::tests_on!([$($more),*] $($body)*);
    };
    ([mysql $(, $more:ident)*] $($body:tt)*) => {
        $crate::test_on!(mysql MySql $($body)*);
        $crate::tests_on!([$($more),*] $($body)*);
    };
    ([group $(, $more:ident)*] $($body:tt)*) => {
        $crate::test_on!(group Group $($body)*);
        $crate::tests_on!([$($more),*] $($body)*);
    };
    ([galera $(, $more:ident)*] $($body:tt)*) => {
        $crate::test_on!(galera Galera $($body)*);
        $crate::tests_on!([$($more),*] $($body)*);
    };
}

/// One test.
#[doc(hidden)]
#[macro_export]
macro_rules! test_on {
    ($name:ident $kind:ident $server:ident $db:ident $db_type:ty $body:block) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            type $server = $crate::$kind;
            async fn body($db: $db_type) $body

            if let Some(db) = $crate::TestDb::<$server>::unless_left_out().await {
                body(db).await;
            }
        }
    };
}
