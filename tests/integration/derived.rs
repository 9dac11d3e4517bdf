//! `#[derive(Versioned)]` on structs that sqlx renames, reads as JSON, or finds by several columns.

use std::collections::BTreeMap;

use lockkit::Error;
use support::{Server, TestDb, on_every_database};

/// A struct that has all of it at once.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_orders", key("tenantId", "orderNumber"))]
#[sqlx(rename_all = "camelCase")]
struct Purchase<L> {
    tenant_id: String,
    order_number: i32,
    #[sqlx(rename = "status")]
    kind: Option<String>,
    #[sqlx(json)]
    order_lines: L,
    #[sqlx(json(nullable))]
    extra_fields: Option<BTreeMap<String, i64>>,
    version: i32,
}

on_every_database! {
    async fn json_and_renamed_columns_are_saved_as_they_are_loaded<S>(db: TestDb<S>) {
        let quote = if S::NAME == "PostgreSQL" || S::NAME == "SQLite" { '"' } else { '`' };
        let name = |it: &str| format!("{quote}{it}{quote}");
        let json = match S::NAME {
            "PostgreSQL" => "jsonb",
            "SQLite" => "TEXT",
            _ => "JSON",
        };
        let (tenant, number, lines, extra) =
            (name("tenantId"), name("orderNumber"), name("orderLines"), name("extraFields"));
        db.execute(&format!(
            "CREATE TABLE t_orders ({tenant} VARCHAR(9), {number} INT, status VARCHAR(9), {lines} {json} NOT NULL, \
             {extra} {json}, version INT NOT NULL, PRIMARY KEY ({tenant}, {number}))"
        ))
        .await;
        db.execute("INSERT INTO t_orders VALUES ('a', 1, NULL, '[\"x\"]', NULL, 1), ('b', 1, 'new', '[]', '{\"n\": \
                    1}', 1)").await;

        let mut order = Purchase::<Vec<String>>::load(&db.pool, "a", 1).await.unwrap();
        assert_eq!((&*order.order_lines, &order.extra_fields), (&["x".to_owned()][..], &None));
        order.order_lines.push("y\"'".to_owned());
        order.kind = Some("new".to_owned());
        order.save(&db.pool).await.unwrap();
        assert_eq!(Purchase::load(&db.pool, "a", 1).await.unwrap(), order);
        let nulls = format!("SELECT COUNT(*) FROM t_orders WHERE {extra} IS NULL AND {tenant} = 'a'");
        assert_eq!(db.fetch_i64(&nulls).await, Some(1), "what is `None` is NULL, not the JSON null");

        order.extra_fields = Some(BTreeMap::from([("k".to_owned(), 7)]));
        order.save(&db.pool).await.unwrap();
        assert_eq!(Purchase::load(&db.pool, "a", 1).await.unwrap(), order);
        assert_eq!(order.version, 3);

        let mut stale = Purchase::<Vec<String>> { version: 1, ..order.clone() };
        assert!(matches!(stale.save(&db.pool).await, Err(Error::Conflict { .. })));
        stale.version = 3;
        stale.delete(&db.pool).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t_orders WHERE status = 'new'").await, Some(1));
    }
}
