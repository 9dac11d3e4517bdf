//! What harms locks on PostgreSQL. In transactions and without names for statements, so that it works behind a pooler.

use sqlx::{AssertSqlSafe, Connection, PgConnection, Result, Row, postgres::PgRow};

use crate::{Finding, Level, Plan};

const TABLES: [&str; 5] = ["lockkit_lease", "lockkit_stock", "lockkit_stock_batch", "lockkit_fence", "lockkit_answer"];

pub(super) async fn findings(conn: &mut PgConnection, role: Option<&str>) -> Result<Vec<Finding>> {
    let mut tx = conn.begin().await?;
    let mut findings = rights(&mut tx, role).await?;
    findings.extend(settings(&mut tx).await?);
    let prepared = sqlx::query_scalar(
        "SELECT gid FROM pg_prepared_xacts
         WHERE database = current_database() AND prepared < clock_timestamp() - interval '5 min'",
    );
    let prepared: Vec<String> = prepared.persistent(false).fetch_all(&mut *tx).await?;
    tx.rollback().await?;
    findings.extend(prepared.iter().map(|gid| {
        let what =
            format!("the prepared transaction `{gid}` is older than 5 min, and keeps its locks until it is ended");
        Finding::new(Level::Fail, "prepared", what).mend(format!("ROLLBACK PREPARED '{}';", gid.replace('\'', "''")))
    }));
    Ok(findings)
}

/// What the role, or else the user, may do with lockkit's tables.
async fn rights(conn: &mut PgConnection, role: Option<&str>) -> Result<Vec<Finding>> {
    let rows = sqlx::query(
        "SELECT
             t AS table_name,
             r.role,
             array_to_string(ARRAY (
                 SELECT p FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p
                 WHERE NOT has_table_privilege(r.role, to_regclass(t)::oid, p)
             ), ', ') AS lacking,
             format('%I', r.role) AS quoted
         FROM unnest($1::text[]) AS t, (SELECT coalesce($2, current_user::text)::name AS role) AS r
         WHERE to_regclass(t) IS NOT NULL",
    );
    let rows = rows.bind(&TABLES[..]).bind(role).persistent(false).fetch_all(conn).await?;
    let mut findings = Vec::new();
    for row in &rows {
        let lacking: String = row.try_get("lacking")?;
        if !lacking.is_empty() {
            let (table, role): (String, String) = (row.try_get("table_name")?, row.try_get("role")?);
            let quoted: String = row.try_get("quoted")?;
            let what = format!("{role} may not {lacking} in {table}");
            let grant = format!("GRANT {lacking} ON {table} TO {quoted};");
            findings.push(Finding::new(Level::Fail, "privileges", what).mend(grant));
        }
    }
    Ok(findings)
}

async fn settings(conn: &mut PgConnection) -> Result<Vec<Finding>> {
    let row = sqlx::query(
        "SELECT
             current_setting('server_version_num')::int AS version,
             current_setting('server_version') AS version_name,
             pg_is_in_recovery() AS is_replica,
             current_setting('default_transaction_read_only') = 'on' AS is_read_only,
             current_setting('synchronous_commit') AS synchronous_commit,
             current_setting('fsync') = 'off' AS forgets,
             current_setting('tcp_keepalives_idle')::int AS keepalive,
             current_setting('lock_timeout') AS lock_timeout,
             current_setting('idle_in_transaction_session_timeout') AS idle_timeout,
             current_setting('log_lock_waits') AS log_lock_waits,
             pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_all,
             format('%I', current_user) AS quoted",
    );
    let row: PgRow = row.persistent(false).fetch_one(conn).await?;
    let mut findings = Vec::new();
    let mut find = |level, check, what: String, mend: &str| {
        findings.push(Finding::new(level, check, what).mend(mend));
    };
    let reload = |setting: &str| format!("ALTER SYSTEM SET {setting}; SELECT pg_reload_conf();");
    let version: i32 = row.try_get("version")?;
    let name: String = row.try_get("version_name")?;
    if row.try_get("is_replica")? {
        let what = "this is a replica: locks belong to the primary, and are refused here";
        find(Level::Fail, "server", what.to_owned(), "-- connect to the primary: target_session_attrs=read-write");
    } else if row.try_get("is_read_only")? {
        let what = "transactions are read-only: leases and named locks are refused";
        find(Level::Fail, "server", what.to_owned(), "ALTER DATABASE … SET default_transaction_read_only = off;");
    }
    let level: String = row.try_get("synchronous_commit")?;
    if level == "off" {
        let what = "synchronous_commit is off: a crash of the server forgets who was granted a lease just before it";
        find(Level::Warn, "durability", what.to_owned(), &reload("synchronous_commit = on"));
    }
    if row.try_get("forgets")? {
        let what = "fsync is off: a crash of the machine can lose the tables of the locks, and all others";
        find(Level::Warn, "durability", what.to_owned(), &reload("fsync = on"));
    }
    // Zero on a local socket, whose other end cannot vanish.
    let keepalive: i32 = row.try_get("keepalive")?;
    if keepalive > 600 {
        let what = format!(
            "tcp_keepalives_idle is {keepalive}: locks of a machine that lost its network stay for that many seconds"
        );
        find(Level::Warn, "keepalive", what, &reload("tcp_keepalives_idle = 30"));
    }
    let lock_timeout: String = row.try_get("lock_timeout")?;
    if lock_timeout != "0" {
        let what = format!("lock_timeout is {lock_timeout}: it ends waits that lockkit bounds by `wait` itself");
        find(Level::Note, "timeouts", what, &reload("lock_timeout = 0"));
    }
    let idle: String = row.try_get("idle_timeout")?;
    if idle == "0" {
        let what = "idle_in_transaction_session_timeout is 0: a transaction that hangs keeps its locks for ever";
        find(Level::Note, "timeouts", what.to_owned(), &reload("idle_in_transaction_session_timeout = '60s'"));
    }
    if row.try_get::<String, _>("log_lock_waits")? == "off" {
        let what = "log_lock_waits is off: the log does not tell who waited for a lock";
        find(Level::Note, "log", what.to_owned(), &reload("log_lock_waits = on"));
    }
    if !row.try_get::<bool, _>("sees_all")? {
        let quoted: String = row.try_get("quoted")?;
        let what = "`lockkit explain` sees the statements of this user only";
        find(Level::Note, "privileges", what.to_owned(), &format!("GRANT pg_monitor TO {quoted};"));
    }
    let what = format!("PostgreSQL {name}");
    findings.push(if version < 120_000 {
        Finding::new(Level::Fail, "version", what + ": lockkit needs 12 or later")
    } else {
        Finding::new(Level::Ok, "version", what)
    });
    Ok(findings)
}

pub(super) async fn plan(conn: &mut PgConnection, statement: &str) -> Result<Plan> {
    let mut tx = conn.begin().await?;
    // A small table is scanned whatever indexes it has.
    let set = "SET TRANSACTION READ ONLY; SET LOCAL enable_seqscan = off; SET LOCAL lock_timeout = '2s'";
    sqlx::raw_sql(set).execute(&mut *tx).await?;
    // Prepared, and the server prepares one statement only.
    let plan = sqlx::query_scalar(AssertSqlSafe(format!("EXPLAIN {statement}"))).persistent(false);
    let plan: Vec<String> = plan.fetch_all(&mut *tx).await?;
    tx.rollback().await?;
    let scan = plan.iter().find(|it| it.contains("Seq Scan on"));
    Ok(scan.map_or(Plan::Index, |it| Plan::Scan(it.trim().trim_start_matches("-> ").trim_start().to_owned())))
}
