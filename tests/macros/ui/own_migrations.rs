use sqlx::{SqlitePool, migrate::Migrator};

async fn start(own: &Migrator, db: &SqlitePool) -> Result<(), lockkit::Error> {
    own.run(db).await?;
    lockkit::migrate(db).await
}

fn main() {}
