//! What a task of a process does with leases, and what it finds wrong.

use std::time::Duration;

use lockkit::{
    Error, Key, Lease, LeaseRequest, Leases, OnLost, Released, Result,
    testing::simulation::{self, LeaseTx, observer, token},
};
use tokio::time::{sleep, timeout};

use crate::{
    clerk::Clerk,
    client::{Client, Tx},
    judge::{Kind, short},
    plan::{Body, End, Fate, Kind as Store, LONG_WAIT, Name, Op, Section, Settings, Stale, Terms, What, Work},
    store::Write,
    world::Shared,
};

/// Longest time for a statement of a section.
const STATEMENT_LIMIT: Duration = Duration::from_secs(3);

/// After a pause of this many milliseconds, the server may have ended an idle transaction, which it does after 5 s.
const MAY_BE_ENDED: u64 = 4_000;

/// How many permits there are.
const PERMITS: u32 = 3;

/// One task of a process.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) world: Shared,
    pub(crate) process: usize,
    pub(crate) leases: Leases<Client>,
    pub(crate) settings: Settings,
    pub(crate) clerk: Clerk,
}

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl Task {
    pub(crate) async fn run(self, ops: Vec<Op>) {
        for Op { pause, what } in ops {
            sleep(ms(pause)).await;
            let asks_for_long = self.asks_for_long(&what);
            if let Err(err) = self.does(what).await {
                let mut world = self.world.lock();
                world.log_of(self.process, || format!("error: {err}"));
                let is_expected = err.is_contended() && !asks_for_long;
                if world.judge.is_calm && !is_expected {
                    world.violation(format!("p{} got an error in a calm run: {err}", self.process));
                }
            }
        }
    }

    /// Whether the request waits so long that it must be granted.
    fn asks_for_long(&self, what: &What) -> bool {
        match what {
            What::Acquire { terms, .. } | What::Run { terms, .. } => terms.wait.is_none() && self.settings.wait > 5000,
            _ => true,
        }
    }

    async fn does(&self, what: What) -> Result<()> {
        let long = ms(LONG_WAIT);
        match what {
            What::Try { key, terms, work } => {
                let asks = self.asks([key.key()]);
                if let Some(lease) = asks.told_at_once(self.request(key, terms).try_acquire().await)? {
                    self.works(lease, Kind::Alone, work).await;
                }
            }
            What::Acquire { key, terms, dropped, work } => {
                let waits = self.waits(key, terms);
                let asks = self.asks([key.key()]);
                let acquiring = self.request(key, terms).acquire();
                let acquired = match dropped {
                    Some(after) => timeout(ms(after), acquiring).await,
                    None => Ok(acquiring.await),
                };
                let Ok(lease) = acquired else {
                    self.log("drops its request");
                    return Ok(());
                };
                let lease = asks.told(lease)?;
                waits.are_over();
                self.works(lease, Kind::Alone, work).await;
            }
            What::Run { key, terms, continues, body, work } => self.runs(key, terms, continues, body, work).await?,
            What::Any { work } => {
                let lease =
                    self.asks(["a", "b"]).of_any().told(self.leases.any(["a", "b"]).wait(long).acquire().await)?;
                self.works(lease, Kind::Alone, work).await;
            }
            What::All { hold, commits } => self.takes_all(hold, commits).await?,
            What::Permits { take: 1, work } => {
                let acquiring = self.leases.semaphore("s", PERMITS).wait(long).acquire();
                let lease = self.asks(["s"]).told(acquiring.await)?;
                self.works(lease, Kind::Permit(PERMITS as usize), work).await;
            }
            What::Permits { take, work } => {
                let acquiring = self.leases.semaphore("s", PERMITS).take(take).wait(long).acquire();
                let leases = self.asks(["s"]).told(acquiring.await)?;
                let kind = Kind::Permit(PERMITS as usize);
                let numbers: Vec<_> = leases.leases().iter().map(|it| self.has(it, kind.clone())).collect();
                sleep(ms(work.holds.iter().sum())).await;
                self.gives_all_up(&numbers);
                leases.release().await?;
            }
            What::Read { work } => {
                let lease = self.asks(["d"]).told(self.leases.rw("d").read().wait(long).acquire().await)?;
                self.works(lease, Kind::Reader, work).await;
            }
            What::Write { work } => {
                let lease = self.asks(["d"]).told(self.leases.rw("d").write().wait(long).acquire().await)?;
                self.works(lease, Kind::Writer, work).await;
            }
            What::Steal { key, looks } => self.steals(&Key::from(key.key()), looks).await?,
            What::Look { key } => {
                let (shown, listed) = (self.leases.show(key.key()).await?, self.leases.list(key.key()).await?);
                self.log(&format!("sees {shown:?} and {} in the list", listed.len()));
            }
            What::Deal(deal) => self.clerk.does(deal).await,
            What::Close => {
                self.log("closes");
                let closed = self.leases.close().await;
                self.log(&format!("has closed: {closed:?}"));
                self.world.lock().is_closed(self.process, closed.is_ok());
            }
        }
        Ok(())
    }

    fn request(&self, key: Name, Terms { ttl_times, min_hold, wait }: Terms) -> LeaseRequest<Client> {
        let mut request = self.leases.lease(key.key()).min_hold(ms(min_hold));
        if ttl_times > 1 {
            request = request.ttl(ms(self.settings.ttl) * ttl_times);
        }
        if let Some(wait) = wait {
            request = request.wait(ms(wait));
        }
        if key == Name::Fair { request.fair() } else { request }
    }

    fn log(&self, what: &str) {
        self.world.lock().log_of(self.process, || what.to_owned());
    }

    fn violation(&self, what: &str) {
        self.world.lock().violation(format!("p{} {what}", self.process));
    }

    fn has(&self, lease: &Lease<Client>, kind: Kind) -> u64 {
        self.world.lock().registers(self.process, lease, kind)
    }

    fn gives_up(&self, number: u64) {
        self.world.lock().gives_up(self.process, number);
    }

    fn gives_all_up(&self, numbers: &[u64]) {
        for number in numbers {
            self.gives_up(*number);
        }
    }

    /// Whether the leases are rows that a transaction can lock. Otherwise its data are in another system than they.
    fn has_rows(&self) -> bool {
        self.settings.kind == Store::Sql
    }

    /// Whether nothing but its holder can have ended the lease.
    fn is_safe(&self, lease: &Lease<Client>) -> bool {
        let world = self.world.lock();
        world.judge.is_undisturbed && !world.judge.was_stolen(lease)
    }

    /// Holds the lease for a time. Finds a loss for which there is no reason.
    async fn holds(&self, lease: &Lease<Client>, holds: &[u64]) {
        for hold in holds {
            sleep(ms(*hold)).await;
            if !lease.is_trusted() {
                self.world.lock().counts.losses += 1;
                if self.is_safe(lease) {
                    self.violation(&format!("lost its lease of `{}` for no reason", lease.key()));
                }
                break;
            }
        }
    }

    /// Works under a lease, and ends it.
    async fn works(&self, lease: Lease<Client>, kind: Kind, Work { holds, extends, end }: Work) {
        let number = self.has(&lease, kind);
        self.holds(&lease, &holds).await;
        if extends {
            let extended = lease.extend(ms(3 * self.settings.ttl)).await;
            self.log(&format!("extends {number}: {extended:?}"));
            if extended.is_err() && self.is_safe(&lease) {
                self.violation(&format!("could not extend lease {number}"));
            }
            self.holds(&lease, &holds).await;
        }
        match end {
            End::Release => self.releases(lease, number).await,
            End::Drop => {
                self.gives_up(number);
                drop(lease);
            }
            End::AbortedRelease(after) => {
                self.gives_up(number);
                drop(timeout(ms(after), lease.release()).await);
            }
            End::Share(after) => {
                let share = lease.share();
                drop(lease);
                self.holds(&share, &[after]).await;
                self.gives_up(number);
                drop(share);
            }
            End::Section(section) => self.section(lease, Some(number), section, false).await,
            End::Race(section, after) => {
                // From here on, the other task may end it at any time.
                self.gives_up(number);
                let (task, share) = (self.clone(), lease.share());
                let racing = tokio::spawn(async move { task.section(share, None, section, true).await });
                sleep(ms(after)).await;
                drop(lease.release().await);
                drop(racing.await);
            }
        }
    }

    async fn releases(&self, lease: Lease<Client>, number: u64) {
        let (was_trusted, is_safe) = (lease.is_trusted(), self.is_safe(&lease));
        let watched = observer(&lease);
        self.gives_up(number);
        let released = lease.release().await;
        self.log(&format!("has released {number}: {released:?}"));
        match released {
            Ok(Released::WhileHeld) => self.world.lock().has_ended(self.process, number, "its release"),
            Ok(Released::AlreadyLost) if was_trusted && is_safe && self.is_safe(&watched) => {
                self.violation(&format!("was told at the release of lease {number} that it was lost"));
            }
            Err(err) if is_safe => self.violation(&format!("could not release lease {number}: {err}")),
            _ => {}
        }
    }

    async fn takes_all(&self, hold: u64, commits: bool) -> Result<()> {
        let acquiring = self.leases.all(["b", "a"]).wait(ms(LONG_WAIT)).acquire();
        let leases = self.asks(["a", "b"]).told(acquiring.await)?;
        let numbers: Vec<_> = leases.leases().iter().map(|it| self.has(it, Kind::Alone)).collect();
        sleep(ms(hold)).await;
        let commits = commits && self.has_rows();
        let tx = if commits { timeout(STATEMENT_LIMIT, self.leases.store().begin()).await.ok() } else { None };
        self.gives_all_up(&numbers);
        let Some(Ok(mut tx)) = tx else {
            drop(leases.release().await);
            return Ok(());
        };
        let mut outcomes = Vec::new();
        for lease in leases.leases() {
            let Ok(Ok(read)) = timeout(STATEMENT_LIMIT, tx.read(lease.key())).await else { return Ok(()) };
            tx.write(Write { key: lease.key().clone(), read, fence: lease.fence().get() });
            outcomes.push(Outcome::unknown(self, lease.key()));
        }
        let committed = simulation::commit_all(leases, tx).await;
        self.log(&format!("commits all: {committed:?}"));
        for outcome in outcomes {
            outcome.is(&committed);
        }
        Ok(())
    }

    async fn runs(&self, key: Name, terms: Terms, continues: bool, body: Body, work: Work) -> Result<()> {
        let (waits, asks) = (self.waits(key, terms), self.asks([key.key()]));
        let on_lost = if continues { OnLost::Continue } else { OnLost::Stop };
        let is_disturbed = matches!(body, Body::Spawns(_));
        let mut escaped = None;
        let ran: Result<()> = self
            .request(key, terms)
            .on_lost(on_lost)
            .run(async |lease| {
                waits.are_over();
                let number = self.has(&lease, Kind::Alone);
                self.holds(&lease, &work.holds).await;
                self.gives_up(number);
                match body {
                    Body::Returns => {}
                    Body::Releases => drop(lease.release().await),
                    Body::Escapes(then) => escaped = Some((lease, then)),
                    Body::Spawns(section) => {
                        let task = self.clone();
                        tokio::spawn(async move { task.section(lease, None, section, true).await });
                        sleep(ms(section.pause / 2)).await;
                    }
                }
                Ok(())
            })
            .await;
        let ran = asks.told(ran);
        if let Err(err) = &ran
            && err.is_lost()
        {
            let mut world = self.world.lock();
            world.counts.losses += 1;
            if world.judge.is_calm && !is_disturbed {
                world.violation(format!("p{} had its body ended in a calm run: {err}", self.process));
            }
        }
        if let Some((lease, then)) = escaped {
            self.escaped(lease, then).await;
        }
        ran.or_else(|err| if err.is_lost() { Ok(()) } else { Err(err) })
    }

    /// Uses a handle whose body has ended. It changes nothing, unless the release after the body was not answered.
    async fn escaped(&self, lease: Lease<Client>, then: Stale) {
        let is_safe = self.is_safe(&lease);
        if lease.is_trusted() && is_safe {
            self.violation("trusts the lease of a body that has ended");
        }
        match then {
            Stale::Release => {
                if let Ok(Released::WhileHeld) = lease.release().await
                    && is_safe
                {
                    self.violation("released a lease that had ended");
                }
            }
            Stale::Extend => {
                if lease.extend(ms(self.settings.ttl)).await.is_ok() && is_safe {
                    self.violation("extended a lease that had ended");
                }
            }
            Stale::Section(section) => self.section(lease, None, section, true).await,
        }
    }

    async fn steals(&self, key: &Key, looks: bool) -> Result<()> {
        let had = {
            let mut world = self.world.lock();
            world.judge.begin_theft(self.process, key);
            world.trusted(self.process, key)
        };
        let mut from = None;
        let taken = if looks {
            match self.leases.show(key.clone()).await {
                Ok(Some(held)) => {
                    from = Some(held.fence.get());
                    self.leases.steal_if(key.clone(), held.fence).await
                }
                Ok(None) => Ok(None),
                Err(err) => Err(err),
            }
        } else {
            self.leases.steal(key.clone()).await
        };
        let mut world = self.world.lock();
        world.judge.end_theft(self.process, key);
        world.log_of(self.process, || format!("steals: {taken:?}"));
        if let Some(taken) = taken?.filter(|it| it.is_this_process) {
            let still = world.trusted(self.process, key);
            let same =
                |(number, fence): &&(u64, u64)| *fence == taken.fence.get() && still.iter().any(|it| it.0 == *number);
            if let Some((number, _)) = had.iter().find(same) {
                world.violation(format!("p{} trusts lease {number} that it has stolen itself", self.process));
            }
            if let Some(from) = from
                && let Some(other) = world.lost_with_fence_after(self.process, key, from)
            {
                let fence = short(from);
                world.violation(format!("p{} lost lease {other} by a theft of fence {fence}", self.process));
            }
        }
        Ok(())
    }

    /// Reads and writes data in a transaction that ends with the lease. `may_be_refused`: others may end the lease too.
    async fn section(&self, lease: Lease<Client>, number: Option<u64>, section: Section, may_be_refused: bool) {
        let share = section.is_shared.then(|| lease.share());
        let working = self.transacts(lease, number, section, may_be_refused);
        match section.dropped {
            Some(after) => {
                if timeout(ms(after), working).await.is_err() {
                    self.log("drops its section");
                }
                if let Some(number) = number {
                    self.gives_up(number);
                }
            }
            None => working.await,
        }
        drop(share);
    }

    async fn transacts(&self, lease: Lease<Client>, number: Option<u64>, section: Section, may_be_refused: bool) {
        let (key, fence) = (lease.key().clone(), lease.fence().get());
        let gives_up = || {
            if let Some(number) = number {
                self.gives_up(number);
            }
        };
        let began = async {
            let tx = self.leases.store().begin().await?;
            let is_let_in = self.has_rows() || tx.guard(&key, fence).await?;
            if self.has_rows() && section.verifies {
                simulation::verify(&lease, tx.pin(&key, token(&lease))).await?;
            }
            let read = tx.read(&key).await?;
            Ok::<_, Error>(is_let_in.then_some((tx, read)))
        };
        let Ok(Ok(Some((mut tx, read)))) = timeout(STATEMENT_LIMIT, began).await else {
            gives_up();
            return;
        };
        sleep(ms(section.pause)).await;
        gives_up();
        // The row of the lease or the guard keeps others out until its end.
        let is_protected = section.verifies || !self.has_rows();
        let fate = match section.fate {
            Fate::Commits if !self.has_rows() => Fate::CommitsAlone,
            fate => fate,
        };
        match fate {
            Fate::RollsBack => {
                drop(tx);
                drop(lease.release().await);
            }
            Fate::LeaseFirst => {
                drop(lease);
                sleep(ms(10)).await;
                if is_protected {
                    tx.write(Write { key: key.clone(), read, fence });
                    self.commits_alone(tx, &key).await;
                }
            }
            Fate::CommitsAlone => {
                tx.write(Write { key: key.clone(), read, fence });
                self.commits_alone(tx, &key).await;
                drop(lease.release().await);
            }
            Fate::Commits => {
                tx.write(Write { key: key.clone(), read, fence });
                let outcome = Outcome::unknown(self, &key);
                let may_be_refused = may_be_refused || section.is_shared || section.pause > MAY_BE_ENDED;
                let is_safe = self.is_safe(&lease) && !may_be_refused;
                let watched = observer(&lease);
                let committed = simulation::commit(lease, tx).await;
                self.log(&format!("commits `{key}`: {committed:?}"));
                outcome.is(&committed);
                match committed {
                    Ok(()) => {
                        if let Some(number) = number {
                            self.world.lock().has_ended(self.process, number, "its commit");
                        }
                    }
                    Err(err) if is_safe && self.is_safe(&watched) => {
                        self.violation(&format!("could not commit: {err}"));
                    }
                    Err(_) => {}
                }
            }
        }
    }

    async fn commits_alone(&self, tx: Tx, key: &Key) {
        let outcome = Outcome::unknown(self, key);
        let committed = timeout(STATEMENT_LIMIT, tx.commit()).await;
        self.log(&format!("commits `{key}` alone: {committed:?}"));
        if let Ok(committed) = committed {
            outcome.is(&committed);
        }
    }

    /// The caller asks for leases with these names from now on.
    fn asks(&self, names: impl IntoIterator<Item = &'static str>) -> Asks {
        let number = self.world.lock().asks(self.process, names);
        Asks { world: self.world.clone(), process: self.process, number, needs_one: false }
    }

    /// The caller waits in the queue of the key from now on.
    fn waits(&self, key: Name, terms: Terms) -> Waits {
        let key = Key::from(key.key());
        let for_ms = terms.wait.unwrap_or(self.settings.wait);
        let number = self.world.lock().waits(self.process, &key, for_ms);
        Waits { world: self.world.clone(), process: self.process, key, number }
    }
}

/// A caller that asks for leases. It asks no more when this is dropped.
struct Asks {
    world: Shared,
    process: usize,
    number: u64,
    /// One of the leases is enough.
    needs_one: bool,
}

impl Asks {
    fn of_any(mut self) -> Self {
        self.needs_one = true;
        self
    }

    /// What the caller is told.
    fn told<T>(self, told: Result<T>) -> Result<T> {
        if told.as_ref().is_err_and(Error::is_contended) {
            self.is_refused();
        }
        told
    }

    /// The same, of a single attempt.
    fn told_at_once<T>(self, told: Result<Option<T>>) -> Result<Option<T>> {
        if let Ok(None) = told {
            self.is_refused();
        }
        told
    }

    fn is_refused(&self) {
        self.world.lock().is_refused(self.process, self.number, self.needs_one);
    }
}

impl Drop for Asks {
    fn drop(&mut self) {
        self.world.lock().asks_no_more(self.process, self.number);
    }
}

/// A caller in a queue. It leaves when this is dropped.
struct Waits {
    world: Shared,
    process: usize,
    key: Key,
    number: u64,
}

impl Waits {
    /// The caller has got the lease.
    fn are_over(&self) {
        self.world.lock().is_served(self.process, &self.key, self.number);
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.world.lock().leaves(self.process, &self.key, self.number);
    }
}

/// A write whose commit is not answered yet. Dropped, it never will be.
struct Outcome {
    world: Shared,
    key: Key,
    is_unknown: bool,
}

impl Outcome {
    fn unknown(task: &Task, key: &Key) -> Self {
        Self { world: task.world.clone(), key: key.clone(), is_unknown: true }
    }

    fn is(mut self, committed: &Result<()>) {
        self.is_unknown = matches!(committed, Err(Error::OutcomeUnknown { .. }));
        let mut world = self.world.lock();
        match committed {
            Ok(()) => {
                world.counts.commits[0] += 1;
                world.judge.acknowledged(&self.key);
            }
            Err(_) => world.counts.commits[1] += u64::from(!self.is_unknown),
        }
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        if self.is_unknown {
            let mut world = self.world.lock();
            world.counts.commits[2] += 1;
            world.judge.unknown(&self.key);
        }
    }
}
