//! The examples with an ORM or a web framework beside lockkit. They check themselves, and that the same code without
//! locks goes wrong.

use support::{TestDb, on_databases, on_every_database, run_example};

on_every_database! {
    async fn in_transactions_of_sea_orm_no_user_orders_twice_and_no_stale_holder_commits<S>(db: TestDb<S>) {
        run_example(&db, "with_sea_orm", &[]).await;
    }
}

on_databases! { [postgres]
    async fn in_transactions_of_diesel_no_user_orders_twice_and_no_stale_holder_commits<S>(db: TestDb<S>) {
        run_example(&db, "with_diesel", &[]).await;
    }

    async fn actix_takes_a_payment_once_restocks_one_at_a_time_and_tells_clients_no_key<S>(db: TestDb<S>) {
        run_example(&db, "with_actix", &["--check"]).await;
    }
}
