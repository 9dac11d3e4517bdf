//! Many requests at once, some of them cut off in the middle; then a look at what is left.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::sleep,
};

use crate::Product;

/// How many requests had each status.
type Statuses = BTreeMap<u16, usize>;

pub(crate) async fn run(service: SocketAddr) -> Result<()> {
    // New users each time, so that the client can be run again on the same database.
    let first_user = fastrand::i64(1..1 << 40);
    let before = stock(service).await?;

    println!("10 users send the same order 4 times, all at once:");
    let orders = (0..40).map(|number| format!("/orders/{}", first_user + number % 10));
    let statuses = all_at_once(service, orders).await?;
    println!("  {statuses:?} (201 ordered, 409 ordered before)");
    ensure!(statuses.get(&201) == Some(&10), "each user must have ordered once");

    println!("40 customers take item 1, and 20 more disconnect while they do:");
    let mut cut_off = JoinSet::new();
    for number in 0..20 {
        cut_off.spawn(disconnect(service, "/items/1/take".to_owned(), Duration::from_millis(number)));
    }
    let statuses = all_at_once(service, (0..40).map(|_| "/items/1/take".to_owned())).await?;
    while let Some(sent) = cut_off.join_next().await {
        sent??;
    }
    let taken = statuses.get(&200).copied().unwrap_or(0);
    println!("  {statuses:?} (200 taken, 410 sold out)");

    println!("20 users disconnect while their payment is under way:");
    let users = || (10..30).map(|number| format!("/orders/{}", first_user + number));
    let mut cut_off = JoinSet::new();
    for path in users() {
        cut_off.spawn(disconnect(service, path, Duration::from_millis(fastrand::u64(1..60))));
    }
    while let Some(sent) = cut_off.join_next().await {
        sent??;
    }

    println!("nothing is left locked: each of them orders again, one after the other:");
    let mut slowest = Duration::ZERO;
    let mut statuses = Statuses::new();
    for path in users() {
        let started = Instant::now();
        let (status, _) = post(service, &path).await?;
        slowest = slowest.max(started.elapsed());
        *statuses.entry(status).or_default() += 1;
    }
    println!("  {statuses:?}, the slowest in {slowest:.0?}");
    ensure!(statuses.keys().all(|it| [201, 409].contains(it)), "an order failed");
    ensure!(slowest < Duration::from_secs(2), "a lock was left behind");

    println!("5 users pay, and each sends its payment 8 times, all at once, because it heard nothing:");
    let payments = (0..40).map(|number| {
        let (user, key) = (first_user + number % 5, format!("idempotency-key: \"{first_user}\""));
        async move { request(service, "POST", &format!("/users/{user}/payments"), &key, "1999").await }
    });
    let mut answers = BTreeMap::<_, usize>::new();
    for answer in payments.collect::<JoinSet<_>>().join_all().await {
        *answers.entry(answer?).or_default() += 1;
    }
    println!("  {answers:?} (201 and the number of the payment)");
    ensure!(
        answers.len() == 5 && answers.iter().all(|((status, _), count)| (*status, *count) == (201, 8)),
        "paid twice"
    );

    println!("10 requests count item 1, one after the other:");
    let statuses = all_at_once(service, (0..10).map(|_| "/items/1/count".to_owned())).await?;
    println!("  {statuses:?} (204 counted)");
    ensure!(statuses.get(&204) == Some(&10), "a count failed");

    let (ready, _) = get(service, "/readyz").await?;
    let (_, metrics) = get(service, "/metrics").await?;
    let counters: Vec<_> = metrics.lines().filter(|it| it.starts_with("lockkit_acquired_total")).collect();
    println!("ready: {ready}; metrics:\n  {}", counters.join("\n  "));
    ensure!(ready == 200, "the service is not ready");
    ensure!(["lease", "row", "named"].iter().all(|it| counters.join(" ").contains(it)), "a lock is missing");

    let after = stock(service).await?;
    let gone = usize::try_from(before - after).context("the stock of item 1 has grown")?;
    ensure!((taken..=taken + 20).contains(&gone), "{gone} pieces are gone, but {taken} were taken");
    println!(
        "item 1: {before} before, {after} left; {taken} taken, {} by customers who did not wait to hear of it",
        gone - taken
    );
    ensure!(after >= 0, "item 1 was oversold");
    Ok(())
}

async fn stock(service: SocketAddr) -> Result<i64> {
    let (_, body) = get(service, "/items").await?;
    let items: Vec<Product> = serde_json::from_str(&body).context("the service lists its items")?;
    Ok(items.iter().find(|it| it.item_id == 1).context("the service has an item 1")?.stock)
}

async fn all_at_once(service: SocketAddr, paths: impl Iterator<Item = String>) -> Result<Statuses> {
    let mut requests = JoinSet::new();
    for path in paths {
        requests.spawn(async move { post(service, &path).await });
    }
    let mut statuses = Statuses::new();
    while let Some(answer) = requests.join_next().await {
        *statuses.entry(answer??.0).or_default() += 1;
    }
    Ok(statuses)
}

async fn get(service: SocketAddr, path: &str) -> Result<(u16, String)> {
    request(service, "GET", path, "accept: */*", "").await
}

async fn post(service: SocketAddr, path: &str) -> Result<(u16, String)> {
    request(service, "POST", path, "accept: */*", "").await
}

/// The status and body of the answer.
async fn request(service: SocketAddr, method: &str, path: &str, header: &str, body: &str) -> Result<(u16, String)> {
    let mut connection = send(service, method, path, header, body).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no end of its head")?;
    let status = head.split(' ').nth(1).context("the answer has no status")?.parse()?;
    Ok((status, body.to_owned()))
}

/// Sends a request and hangs up without waiting for the answer.
async fn disconnect(service: SocketAddr, path: String, after: Duration) -> Result<()> {
    let connection = send(service, "POST", &path, "accept: */*", "").await?;
    sleep(after).await;
    drop(connection);
    Ok(())
}

async fn send(service: SocketAddr, method: &str, path: &str, header: &str, body: &str) -> Result<TcpStream> {
    let mut connection = TcpStream::connect(service).await.with_context(|| format!("no service at {service}"))?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {service}\r\nconnection: close\r\n{header}\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    connection.write_all(head.as_bytes()).await?;
    Ok(connection)
}
