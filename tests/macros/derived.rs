//! `#[derive(Versioned)]` beside sqlx's own options, and on generic structs.

use std::fmt::Debug;

use sqlx::SqlitePool;

use crate::fixture::{Shop, assert_send};

macro_rules! renamed {
    ($($module:ident: $case:literal, $key:literal, $version:literal;)*) => {$(
        mod $module {
            #[derive(Debug, PartialEq, sqlx::FromRow, lockkit::Versioned)]
            #[versioned(table = "t_renamed", key = $key, version = $version)]
            #[sqlx(rename_all = $case)]
            pub(crate) struct Article {
                pub(crate) item_id: i64,
                pub(crate) in_stock2: i64,
                pub(crate) version_no: i64,
            }
        }

        #[tokio::test]
        async fn $module() {
            let shop = Shop::new().await;
            let names = [$key, $version];
            let column = |field: &str| match $case {
                "snake_case" | "lowercase" => field.to_owned(),
                "UPPERCASE" | "SCREAMING_SNAKE_CASE" => field.to_uppercase(),
                "camelCase" => "inStock2".to_owned(),
                _ => "InStock2".to_owned(),
            };
            let table = format!(
                "CREATE TABLE t_renamed ({} INTEGER, {} INTEGER, {} INTEGER)",
                names[0],
                column("in_stock2"),
                names[1]
            );
            sqlx::raw_sql(sqlx::AssertSqlSafe(table)).execute(&shop.db).await.unwrap();
            sqlx::raw_sql("INSERT INTO t_renamed VALUES (7, 5, 1)").execute(&shop.db).await.unwrap();
            let mut item = $module::Article::load(&shop.db, 7).await.unwrap();
            item.in_stock2 = 4;
            item.save(&shop.db).await.unwrap();
            assert_eq!($module::Article::load(&shop.db, 7).await.unwrap(), item);
            assert_eq!((item.item_id, item.in_stock2, item.version_no), (7, 4, 2));
        }
    )*};
}

renamed! {
    columns_in_snake_case_are_saved: "snake_case", "item_id", "version_no";
    columns_in_lowercase_are_saved: "lowercase", "item_id", "version_no";
    columns_in_uppercase_are_saved: "UPPERCASE", "ITEM_ID", "VERSION_NO";
    columns_in_screaming_snake_case_are_saved: "SCREAMING_SNAKE_CASE", "ITEM_ID", "VERSION_NO";
    columns_in_camel_case_are_saved: "camelCase", "itemId", "versionNo";
    columns_in_pascal_case_are_saved: "PascalCase", "ItemId", "VersionNo";
}

trait Kind {
    type Stock;
}

#[derive(Debug, Clone)]
struct Counted;

impl Kind for Counted {
    type Stock = i64;
}

/// Bounds, defaults, associated types, and a name that the derive would like to use.
#[derive(Debug, Clone, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Generic<O: Into<i64> + Clone, K: Kind = Counted>
where
    K::Stock: Debug,
{
    item_id: O,
    stock: K::Stock,
    version: i64,
}

#[tokio::test]
async fn generic_structs_are_loaded_saved_and_deleted() {
    let shop = Shop::new().await;
    let mut item: Generic<i32> = assert_send(Generic::load(&shop.db, 7)).await.unwrap();
    item.stock = 3;
    assert_send(item.save(&shop.db)).await.unwrap();
    assert_eq!((item.version, shop.stock().await), (2, 3));
    assert_send(item.delete(&shop.db)).await.unwrap();
    assert!(item.delete(&shop.db).await.unwrap_err().is_conflict());
}

/// Somebody else's function that is generic over where it runs.
async fn save_anywhere<O: lockkit::dialect::On<sqlx::Sqlite>>(item: &mut Generic<i64>, on: O) -> lockkit::Result<()> {
    item.save(on).await?;
    Ok(())
}

#[tokio::test]
async fn a_save_may_be_generic_over_where_it_runs() {
    let shop = Shop::new().await;
    let db: &SqlitePool = &shop.db;
    let mut item: Generic<i64> = Generic::load(db, 7).await.unwrap();
    save_anywhere(&mut item, db).await.unwrap();
    save_anywhere(&mut item, &mut db.acquire().await.unwrap()).await.unwrap();
    assert_eq!(item.version, 3);
}
