//! The client that checks `with_actix`: it sends requests at once, disconnects and repeats them, and counts the rows.

use std::{collections::HashSet, time::Duration};

use actix_web::{HttpResponse, web};
use anyhow::{Context, Result, bail, ensure};
use reqwest::{Client, RequestBuilder, StatusCode};
use tokio::{task::JoinSet, time::timeout};

use crate::{ApiError, Shop, insert_payment, serve, set_stock, stock_after_delivery};

/// How often a request is sent at once.
const COPIES: u64 = 12;

const USERS: usize = 4;

/// What no answer may contain: keys, tables and SQL.
const SECRETS: [&str; 6] = ["pay:", "restock:", "8e03978e", "t_", "lockkit", "INSERT"];

/// The same handlers without a lock, to see that they go wrong.
pub(crate) fn naive(service: &mut web::ServiceConfig) {
    service
        .route("/naive/users/{user_id}/payments", web::post().to(naive_pay))
        .route("/naive/items/{item_id}/restock", web::post().to(naive_restock));
}

async fn naive_pay(
    shop: web::Data<Shop>,
    user_id: web::Path<i64>,
    cents: web::Json<i64>,
) -> Result<HttpResponse, ApiError> {
    let mut conn = shop.db.acquire().await?;
    Ok(HttpResponse::Created().json(insert_payment(&mut conn, *user_id, *cents).await?))
}

async fn naive_restock(shop: web::Data<Shop>, item_id: web::Path<i64>) -> Result<HttpResponse, ApiError> {
    let stock = stock_after_delivery(&shop.db, *item_id).await?;
    set_stock(&mut *shop.db.acquire().await?, *item_id, stock).await?;
    Ok(HttpResponse::NoContent().finish())
}

/// Status, `Retry-After` and body.
type Answer = (StatusCode, Option<String>, String);

pub(crate) async fn run(shop: &Shop) -> Result<()> {
    let (server, number) = serve(shop, 0)?;
    let handle = server.handle();
    let serving = tokio::spawn(server);
    // A request that hangs fails the check.
    let client = Client::builder().timeout(Duration::from_mins(1)).build()?;
    let post = |path: &str| client.post(format!("http://127.0.0.1:{number}{path}"));

    let (payments, _) = pay(shop, |user| post(&format!("/naive/users/{user}/payments"))).await?;
    ensure!(payments.iter().any(|it| *it > 1), "{payments:?}: the naive handler must take payments twice");
    let (payments, receipts) = pay(shop, |user| post(&format!("/users/{user}/payments"))).await?;
    ensure!(payments == [1; USERS] && receipts == USERS, "{payments:?} payments, {receipts} receipts");

    let (restocked, stock) = restock(shop, post("/naive/items/1/restock")).await?;
    ensure!(stock < restocked, "the naive handler must lose one of {restocked} deliveries, and the stock is {stock}");
    let (restocked, stock) = restock(shop, post("/items/1/restock")).await?;
    ensure!(restocked > 0 && stock == restocked, "{restocked} deliveries, and a stock of {stock}");

    let pay = |key: &str, cents: i64| post("/users/1/payments").header("idempotency-key", key).json(&cents);
    ensure_refused(pay("8e03978e", 2000), StatusCode::UNPROCESSABLE_ENTITY, false).await.context("another payment")?;
    ensure_refused(post("/users/1/payments").json(&1), StatusCode::BAD_REQUEST, false).await.context("no key")?;
    let failing = pay("2", 0);
    ensure_refused(failing, StatusCode::INTERNAL_SERVER_ERROR, false).await.context("a row that the table refuses")?;
    lose_lease(shop, &post).await?;
    let held = shop.leases.lease("restock:2").acquire().await?;
    ensure_refused(post("/items/2/restock"), StatusCode::CONFLICT, true).await.context("a lease that is held")?;
    held.release().await?;
    shop.leases.close().await?;
    let late = post("/items/2/restock");
    ensure_refused(late, StatusCode::SERVICE_UNAVAILABLE, true).await.context("a service that closes")?;

    handle.stop(true).await;
    serving.await??;
    Ok(())
}

/// Each user pays once, and sends that several times at once; half of the connections break. Returns how many payments
/// each of them has made, and the number of different answers.
async fn pay(shop: &Shop, post: impl Fn(usize) -> RequestBuilder) -> Result<(Vec<i64>, usize)> {
    sqlx::query("DELETE FROM t_payments").execute(&shop.db).await?;
    let mut requests = JoinSet::new();
    for number in 0..COPIES {
        for user in 1..=USERS {
            let request = post(user).header("idempotency-key", "8e03978e").json(&1999);
            let patience = if number % 2 == 0 { Duration::from_mins(1) } else { Duration::from_millis(number) };
            requests.spawn(async move { timeout(patience, answer(request)).await.ok().transpose() });
        }
    }
    let mut receipts = HashSet::new();
    for answered in requests.join_all().await {
        if let Some((status, _, receipt)) = answered? {
            ensure!(status == StatusCode::CREATED, "{status}: {receipt}");
            receipts.insert(receipt);
        }
    }
    let count = "SELECT count(*) FROM t_payments GROUP BY user_id ORDER BY user_id";
    let payments: Vec<i64> = sqlx::query_scalar(count).fetch_all(&shop.db).await?;
    println!("payments of each user: {payments:?}; {} different receipts", receipts.len());
    Ok((payments, receipts.len()))
}

/// Returns how many requests have restocked the item, and its stock.
async fn restock(shop: &Shop, post: RequestBuilder) -> Result<(i64, i64)> {
    sqlx::query("UPDATE t_items SET stock = 0").execute(&shop.db).await?;
    let request = || post.try_clone().context("a request without a stream");
    let requests = (0..COPIES).map(|_| Ok(answer(request()?))).collect::<Result<JoinSet<_>>>()?;
    let mut restocked = 0;
    for answered in requests.join_all().await {
        match answered? {
            (StatusCode::NO_CONTENT, ..) => restocked += 1,
            (status, retry_after, body) => {
                ensure!(status == StatusCode::CONFLICT && retry_after.is_some(), "{status}: {body}");
            }
        }
    }
    let stock = sqlx::query_scalar("SELECT stock FROM t_items WHERE item_id = 1").fetch_one(&shop.db).await?;
    println!("restocked {restocked} times by one: {stock}");
    Ok((restocked, stock))
}

/// Another process takes over the lease of a handler that runs.
async fn lose_lease(shop: &Shop, post: impl Fn(&str) -> RequestBuilder) -> Result<()> {
    for _ in 0..100 {
        let mut handling = JoinSet::from_iter([answer(post("/items/2/restock"))]);
        let handled = loop {
            // Unless the lease is not taken yet, or the handler has committed.
            shop.leases.steal("restock:2").await?;
            if let Some(handled) = handling.try_join_next() {
                break handled??;
            }
        };
        if handled.0 != StatusCode::NO_CONTENT {
            return is_refused(&handled, StatusCode::SERVICE_UNAVAILABLE, false).context("a lease that is lost");
        }
    }
    bail!("no handler has lost its lease")
}

async fn ensure_refused(request: RequestBuilder, status: StatusCode, may_repeat: bool) -> Result<()> {
    is_refused(&answer(request).await?, status, may_repeat)
}

fn is_refused(answer: &Answer, expected: StatusCode, may_repeat: bool) -> Result<()> {
    println!("{answer:?}");
    let (status, retry_after, _) = answer;
    ensure!(*status == expected && retry_after.is_some() == may_repeat, "{answer:?} instead of {expected}");
    Ok(())
}

async fn answer(request: RequestBuilder) -> Result<Answer> {
    let answer = request.send().await?;
    let retry_after = answer.headers().get("retry-after").map(|it| it.to_str().map(str::to_owned)).transpose()?;
    let (status, body) = (answer.status(), answer.text().await?);
    let told = SECRETS.iter().find(|it| !status.is_success() && body.contains(**it));
    ensure!(told.is_none(), "an answer with {told:?}: {body}");
    Ok((status, retry_after, body))
}
