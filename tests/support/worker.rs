//! `test-worker`: a process that holds locks and is stopped or killed by a test, or draws with other processes.
//!
//! It says what it has reached in lines on its standard output, and goes on when it is told `go` on its standard input.

use std::env;
use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use lockkit::idempotent::Attempt;
use lockkit::{Error, Lease, Leases, NamedLock, RowLock, SessionLock, Tx, dialect::SessionOps};
use sqlx::pool::PoolOptions;
use sqlx::{Database, Encode, Pool, Type};
use support::draws::{Draws, Strategy, Tally};
use support::provider::Recipe;
use support::{Backend, MariaDb, MySql, Postgres, Server, Sqlite, passes, provider};
use tokio::io::{AsyncBufReadExt, BufReader, stdin};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

const TTL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [server, url, work @ ..] = &*arguments else {
        panic!("usage: test-worker SERVER URL WORK…; the tests start it themselves");
    };
    match (*server, work) {
        (Postgres::NAME, ["hold", "session"]) => return hold_session::<Postgres>(url).await,
        (MariaDb::NAME, ["hold", "session"]) => return hold_session::<MariaDb>(url).await,
        (MySql::NAME, ["hold", "session"]) => return hold_session::<MySql>(url).await,
        _ => {}
    }
    match *server {
        Sqlite::NAME => Box::pin(run::<Sqlite>(url, work)).await,
        Postgres::NAME => Box::pin(run::<Postgres>(url, work)).await,
        MariaDb::NAME => Box::pin(run::<MariaDb>(url, work)).await,
        MySql::NAME => Box::pin(run::<MySql>(url, work)).await,
        _ => panic!("{server} is not a server"),
    }
}

async fn run<S>(url: &str, work: &[&str])
where
    S: Backend,
    i64: for<'v> Encode<'v, S::DB> + Type<S::DB>,
    <S::DB as Database>::Arguments: Clone,
{
    let pool = PoolOptions::new().max_connections(4).connect(url).await.expect("connect");
    let worker = Worker::<S> { leases: Leases::builder(pool.clone()).ttl(TTL).build().expect("valid settings"), pool };
    match work {
        ["draw", strategy, tasks, draws] => {
            let number = |text: &str| text.parse().expect("a number");
            worker.draw(strategy.parse().expect("a strategy"), number(tasks), number(draws)).await;
        }
        ["hold", "row"] => worker.hold_row().await,
        ["hold", "named"] => worker.hold_name().await,
        ["hold", "lease"] => worker.hold_lease().await,
        ["keep", way] => worker.keep(way).await,
        ["pass", tasks] => {
            passes::append_all_the_time::<S>(worker.pool, worker.leases, tasks.parse().expect("a number")).await;
        }
        ["write"] => worker.write_all_the_time().await,
        ["commit"] => worker.commit().await,
        ["pay", recipe, key] => worker.pay(recipe, key).await,
        ["pay all", keys] => worker.pay_all(keys.parse().expect("a number")).await,
        ["pin"] => worker.pin().await,
        ["run"] => worker.run().await,
        _ => panic!("{work:?} is not a kind of work"),
    }
}

/// Takes a session lock, which not every database has, and keeps it.
async fn hold_session<S: Server<DB: SessionOps>>(url: &str) {
    let pool: Pool<S::DB> = PoolOptions::new().max_connections(1).connect(url).await.expect("connect");
    let _session = SessionLock::new("item:1").acquire(&pool).await.expect("acquire the session lock");
    println!("holding");
    std::future::pending::<()>().await;
}

struct Worker<S: Backend> {
    pool: Pool<S::DB>,
    leases: Leases<Pool<S::DB>>,
}

impl<S> Worker<S>
where
    S: Backend,
    i64: for<'v> Encode<'v, S::DB> + Type<S::DB>,
    <S::DB as Database>::Arguments: Clone,
{
    async fn draw(self, strategy: Strategy, tasks: u64, draws: u64) {
        println!("ready");
        told_to_go_on().await;
        let Tally { won, sold_out, gave_up } = Draws::<S>::new(self.pool).draw_all(strategy, tasks, draws).await;
        println!("{won} {sold_out} {gave_up}");
    }

    /// Locks the item's row, writes, and never ends its transaction.
    async fn hold_row(self) {
        let mut tx = lockkit::begin(&self.pool).await.expect("begin");
        RowLock::table("item").by("id", 1_i64).lock(&mut *tx).await.expect("lock the row");
        S::execute(&mut tx, "UPDATE item SET wins = 99").await.expect("write");
        println!("holding");
        std::future::pending::<()>().await;
    }

    /// Locks a name, writes, and never ends its transaction.
    async fn hold_name(self) {
        let mut tx = lockkit::begin(&self.pool).await.expect("begin");
        NamedLock::new("item:1").lock(&mut *tx).await.expect("lock the name");
        S::execute(&mut tx, "UPDATE item SET wins = 99").await.expect("write");
        println!("holding");
        std::future::pending::<()>().await;
    }

    /// Takes the lease, and writes in a transaction that never ends.
    async fn hold_lease(self) {
        let lease = self.lease().await;
        let mut tx = lockkit::begin(&self.pool).await.expect("begin");
        S::execute(&mut tx, "UPDATE item SET wins = 99").await.expect("write");
        println!("holding {}", lease.fence());
        std::future::pending::<()>().await;
    }

    /// Asks for the lease in this way, for as long as it takes, and keeps it.
    async fn keep(self, way: &str) {
        let request = match way {
            "lease" => self.leases.lease("item:1"),
            "fair" => self.leases.lease("item:1").fair(),
            "permit" => self.leases.semaphore("item:1", 1),
            "write" => self.leases.rw("item:1").write(),
            _ => panic!("{way} is not a way to ask"),
        };
        println!("asking");
        let _lease = request.wait(Duration::from_hours(1)).acquire().await.expect("acquire the lease");
        println!("holding");
        std::future::pending::<()>().await;
    }

    /// Has a transaction that writes open most of the time.
    async fn write_all_the_time(self) {
        let pause = Duration::from_millis(5);
        loop {
            // Beside others that do the same, it may not be its turn for a long time.
            let Ok(mut tx) = lockkit::begin(&self.pool).await else { continue };
            S::execute(&mut tx, "UPDATE item SET wins = 99").await.expect("write");
            tokio::time::sleep(pause).await;
            tx.commit().await.expect("commit");
            println!("writing");
        }
    }

    /// Takes the lease, writes, and commits under it when told so.
    async fn commit(self) {
        let lease = self.lease().await;
        // The open transaction of a stopped process would lock the whole of a SQLite database.
        let early = S::NAME != Sqlite::NAME;
        let mut tx = if early { Some(self.write().await) } else { None };
        println!("holding {}", lease.fence());
        told_to_go_on().await;
        if tx.is_none() {
            tx = Some(self.write().await);
        }
        say(&lease.commit(tx.expect("written by now")).await);
    }

    /// Takes the lease, verifies it in a transaction, and commits when told so.
    async fn pin(self) {
        let lease = self.lease().await;
        let mut tx = lockkit::begin(&self.pool).await.expect("begin");
        lease.verify(&mut tx).await.expect("verify");
        S::execute(&mut tx, "UPDATE item SET wins = 99").await.expect("write");
        println!("holding {}", lease.fence());
        told_to_go_on().await;
        say(&lease.commit(tx).await);
    }

    /// Pays for a key, and stays between the provider's answer and the commit until it is told to go on.
    async fn pay(self, recipe: &str, key: &str) {
        let recipe = recipe.parse().expect("a recipe");
        let charged = async |_| {
            println!("charged");
            told_to_go_on().await;
        };
        match provider::pay::<S>(&self.leases, recipe, key, charged).await {
            Ok(answered) => println!("answered {}", answered.into_inner()),
            Err(err) => say(&Err(err)),
        }
    }

    /// Pays for all of these keys, four at a time.
    async fn pay_all(self, keys: u32) {
        let mut paying = JoinSet::new();
        for task in 0..4 {
            let leases = self.leases.clone();
            paying.spawn(async move {
                for number in (task..keys).step_by(4) {
                    let key = format!("pay:{number}");
                    let charged = async |attempt| {
                        if attempt != Attempt::First {
                            println!("asked");
                        }
                    };
                    // What fails for a reason of the moment is repeated, as a client does.
                    while let Err(err) = provider::pay::<S>(&leases, Recipe::Asks, &key, charged).await {
                        println!("again: {err}");
                    }
                    println!("paid");
                }
            });
        }
        while let Some(paid) = paying.join_next().await {
            paid.expect("it pays");
        }
        println!("paid all");
    }

    /// Runs a body under the lease that takes its next step when told so. It says that it holds the lease once the body
    /// waits: a process that is stopped while its body is polled goes on to the end of that poll.
    async fn run(self) {
        let (started, mut has_started) = oneshot::channel();
        let mut ran = pin!(self.leases.lease("item:1").run(|lease| async move {
            started.send(lease.fence()).expect("it is received below");
            told_to_go_on().await;
            println!("took the next step");
            let mut tx = self.write().await;
            S::execute(&mut tx, "UPDATE item SET wins = 99").await.expect("write");
            tx.commit().await
        }));
        let ran = poll_fn(|context| {
            let polled = ran.as_mut().poll(context);
            if let Ok(fence) = has_started.try_recv() {
                println!("holding {fence}");
            }
            polled
        });
        say(&ran.await);
    }

    async fn lease(&self) -> Lease<Pool<S::DB>> {
        self.leases.lease("item:1").acquire().await.expect("acquire the lease")
    }

    async fn write(&self) -> Tx<S::DB> {
        let mut tx = lockkit::begin(&self.pool).await.expect("begin");
        S::execute(&mut tx, "UPDATE item SET wins = 99").await.expect("write");
        tx
    }
}

fn say(result: &Result<(), Error>) {
    match result {
        Ok(()) => println!("done"),
        Err(Error::Lost { .. }) => println!("lost"),
        Err(err) => println!("failed: {err} ({err:?})"),
    }
}

async fn told_to_go_on() {
    let line = BufReader::new(stdin()).lines().next_line().await.expect("read from the test");
    assert_eq!(line.as_deref(), Some("go"), "the test is gone");
}
