//! One run of a plan: the event loop, and the processes.
//!
//! Each process has a Tokio runtime of its own, with one thread and a paused clock. The loop lets each of them run
//! until the time of the next event, or until it sends something, whichever is first. So only one of them runs at a
//! time, and in the same order in every run.

use std::time::Duration;

use lockkit::{Leases, testing::simulation::simulate_tokens};
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
    time::{Instant, advance, sleep_until},
};

use crate::{
    clerk::Clerk,
    client::Client,
    driver,
    judge::Judge,
    plan::{Fault, Kind, Link, Op, Plan},
    task::Task,
    world::{Clock, Counts, Event, Shared, World},
};

const MS: u64 = 1000;

/// When the links of a run that goes on for so long are repaired, and when it must be over, in microseconds.
const REPAIRED_AFTER: u64 = 45_000 * MS;
const OVER_AFTER: u64 = 140_000 * MS;

/// How long after its last operation a run goes on, beside two ttls: longer than any call, retry and transaction.
const REST: u64 = 8_000 * MS;

/// The same, of stocks and versions: an unanswered COMMIT is waited for.
const REST_OF_STOCK: u64 = 35_000 * MS;

/// How soon after all is at rest a free lease is granted.
const PROBE_LIMIT: Duration = Duration::from_millis(400);

/// Longest time for the probe of one process: six leases.
const PROBE: u64 = 6 * 4_000 * MS;

/// The result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// What went wrong.
    pub violations: Vec<String>,
    /// How much was done.
    pub counts: Counts,
    /// A digest of all that was sent and answered. Equal for two runs of one plan.
    pub digest: u64,
    /// What happened, a line each. Empty unless it was asked for.
    pub timeline: Vec<String>,
}

/// Runs a plan.
pub fn run(plan: &Plan, is_logged: bool) -> Outcome {
    simulate_tokens();
    let mut run = Run::new(plan, is_logged);
    run.work();
    run.rest();
    run.probe();
    run.end()
}

struct Run<'p> {
    plan: &'p Plan,
    world: Shared,
    processes: Vec<Process>,
    tasks: Vec<JoinHandle<()>>,
}

struct Process {
    runtime: Option<Runtime>,
    leases: Option<Leases<Client>>,
    clerk: Option<Clerk>,
    /// The state of `fastrand` for this process.
    random: u64,
}

impl<'p> Run<'p> {
    fn new(plan: &'p Plan, is_logged: bool) -> Self {
        let mut world = World::new(plan, Judge::new(plan), is_logged);
        let mut processes = Vec::new();
        for number in 0..plan.processes.len() {
            world.add_process(Link::GOOD);
            let random = plan.seed ^ ((number as u64 + 1) << 32);
            processes.push(Process { runtime: None, leases: None, clerk: None, random });
        }
        for (at, fault) in &plan.faults {
            world.plan(at * MS, Event::Fault(fault.clone()));
        }
        let mut run = Self { plan, world: Shared::new(world), processes, tasks: Vec::new() };
        for (process, it) in plan.processes.iter().enumerate() {
            run.start(process, it.tasks.clone());
        }
        run
    }

    fn start(&mut self, process: usize, tasks: Vec<Vec<Op>>) {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        self.processes[process].runtime = Some(runtime.expect("a runtime without I/O needs nothing"));
        self.inside(process, |run, runtime| {
            let now = run.world.lock().now;
            let clock = Clock::new(Instant::now(), now, run.plan.processes[process].fast_ppm);
            run.world.lock().started(process, clock);
            let task = run.task(process);
            for ops in tasks {
                run.tasks.push(runtime.spawn(task.clone().run(ops)));
            }
            let Task { leases, clerk, .. } = task;
            (run.processes[process].leases, run.processes[process].clerk) = (Some(leases), Some(clerk));
        });
    }

    /// A task of a process, with leases and a pool of its own. Clones share them.
    fn task(&self, process: usize) -> Task {
        let client = Client::new(&self.world, process);
        let settings = self.plan.settings;
        let pool = driver::pool(client.clone(), settings.connections);
        let clerk = Clerk::new(&self.world, process, pool, settings.segments);
        let (ttl, wait) = (Duration::from_millis(settings.ttl), Duration::from_millis(settings.wait));
        let leases = Leases::builder(client).ttl(ttl).wait(wait).hand_over(settings.hand_over);
        let leases = leases.sweep_every(None).holder(format!("p{process}"));
        let leases = leases.build().expect("the settings of a plan are valid");
        Task { world: self.world.clone(), process, leases, settings, clerk }
    }

    /// Does something in a process. Nothing if it was killed.
    fn inside<T>(&mut self, process: usize, act: impl FnOnce(&mut Self, &Runtime) -> T) -> Option<T> {
        let runtime = self.processes[process].runtime.take()?;
        fastrand::seed(self.processes[process].random);
        let done = {
            let _inside = runtime.enter();
            act(self, &runtime)
        };
        self.processes[process].random = fastrand::get_seed();
        self.processes[process].runtime = Some(runtime);
        Some(done)
    }

    /// Lets a process run until this time. Returns `false` if it has sent something before.
    fn step(&mut self, process: usize, to: u64) -> bool {
        let (clock, sent, is_stopped) = {
            let world = self.world.lock();
            let place = &world.places[process];
            (world.clock(process), place.sent.clone(), place.is_stopped)
        };
        if is_stopped {
            return true;
        }
        let reached = self.inside(process, |run, runtime| {
            let reached = runtime.block_on(async {
                tokio::select! {
                    biased;
                    () = sent.notified() => false,
                    () = sleep_until(clock.shows(to)) => true,
                }
            });
            run.world.lock().check(process);
            reached
        });
        reached.unwrap_or(true)
    }

    /// Advances the world to this time.
    fn drive(&mut self, to: u64) {
        loop {
            let next = |run: &Self| run.world.lock().next_event().map_or(to, |it| it.min(to));
            let mut process = 0;
            while process < self.processes.len() {
                if self.step(process, next(self)) {
                    process += 1;
                }
            }
            let event = {
                let at = next(self);
                let mut world = self.world.lock();
                world.now = world.now.max(at);
                world.take_due()
            };
            match event {
                Some(event) => self.handle(event),
                None if self.world.lock().now >= to => return,
                None => {}
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let Some(event) = self.world.lock().defers(event) else { return };
        match event {
            Event::Arrives { call, is_first } => self.world.lock().arrives(call, is_first),
            Event::IsAnswered { call } => self.world.lock().answers(call),
            Event::Freed { process, key } => self.world.lock().freed(process, &key),
            Event::GivesUp { call } => self.world.lock().lock_times_out(call),
            Event::Ends(tx) => self.world.lock().end(tx),
            Event::IdlesAt(tx) => self.world.lock().idles(tx),
            Event::SessionEnds(id) => self.world.lock().session_ends(id),
            Event::Reports(id) => self.world.lock().reports(id),
            Event::MinHoldEnds => self.world.lock().min_hold_ends(),
            Event::Agent { process, generation, timer } => {
                let mut world = self.world.lock();
                if world.places[process].generation == generation {
                    world.has_timer(process, timer);
                }
            }
            Event::Continues { process } => {
                self.go_on(process);
                self.world.lock().note_fault();
            }
            Event::Restarts { process, tasks } => {
                self.world.lock().log("fault", || format!("p{process} starts again"));
                self.start(process, tasks);
            }
            Event::Fault(fault) => {
                self.fail(fault);
                self.world.lock().note_fault();
            }
        }
    }

    fn fail(&mut self, fault: Fault) {
        let mut world = self.world.lock();
        world.log("fault", || format!("{fault:?}"));
        match fault {
            Fault::Link { process, link } => world.places[process].link = link,
            Fault::Stop { process, lasts } => {
                if !world.places[process].is_stopped && self.processes[process].runtime.is_some() {
                    world.places[process].is_stopped = true;
                    world.stops_agent(process);
                    let until = world.now + lasts * MS;
                    world.plan(until, Event::Continues { process });
                }
            }
            Fault::Kill { process, restarts, tasks } => {
                let Some(runtime) = self.processes[process].runtime.take() else { return };
                world.places[process].generation += 1;
                world.places[process].is_stopped = false;
                let at = world.now + restarts * MS;
                world.plan(at, Event::Restarts { process, tasks });
                let handles = world.judge.killed(process);
                world.refusals.killed(process);
                world.closes_all(process);
                drop(world);
                let Process { leases, clerk, .. } = &mut self.processes[process];
                drop((runtime, handles, leases.take(), clerk.take()));
            }
            Fault::Step { by } => world.store.step(by * 1000),
            Fault::Restart => world.restart_store(),
            Fault::Lags => world.store.lags(),
            Fault::Forgets { is_noticed } => {
                world.restart_store();
                let now = world.now;
                let forgotten = world.store.forget(is_noticed, now);
                let restored: Vec<_> = world.store.tokens().collect();
                world.judge.forgets(forgotten, restored, is_noticed);
            }
        }
    }

    /// A stopped process goes on. Its clock has counted, and nothing ran.
    fn go_on(&mut self, process: usize) {
        let (to, was_stopped) = {
            let mut world = self.world.lock();
            let was_stopped = std::mem::replace(&mut world.places[process].is_stopped, false);
            world.log("fault", || format!("p{process} goes on"));
            if was_stopped {
                world.wakes_agent(process);
            }
            (world.clock(process).shows(world.now), was_stopped)
        };
        if was_stopped {
            self.inside(process, |_, runtime| {
                runtime.block_on(async { advance(to.saturating_duration_since(Instant::now())).await });
            });
        }
    }

    /// All operations and faults of the plan.
    fn work(&mut self) {
        let last = self.plan.faults.last().map_or(0, |(at, _)| at * MS);
        let mut at = 0;
        loop {
            at += 500 * MS;
            self.drive(at);
            if at > OVER_AFTER || self.is_done() && at > last + 500 * MS {
                break;
            }
            if at == REPAIRED_AFTER {
                self.repair();
            }
        }
        self.repair();
        let left = self.tasks.iter().filter(|it| !it.is_finished()).count();
        if left > 0 {
            self.world.lock().violation(format!("{left} tasks do not end"));
        }
    }

    fn is_done(&self) -> bool {
        self.tasks.iter().all(JoinHandle::is_finished)
    }

    fn repair(&self) {
        let mut world = self.world.lock();
        world.places.iter_mut().for_each(|it| it.link = Link::GOOD);
        world.note_fault();
    }

    /// Waits until nothing can be left of the operations, and looks whether something is.
    fn rest(&mut self) {
        let longest = if self.is_of_stock() { REST_OF_STOCK } else { REST };
        let at = self.world.lock().now + 2 * (self.plan.longest_ttl() + self.plan.settings.session) * MS + longest;
        self.drive(at);
        let mut found = Vec::new();
        {
            let world = self.world.lock();
            let (held, open) = (world.held(at), world.store.open_transactions());
            if !held.is_empty() {
                found.push(format!("leases are left: {held:?}"));
            }
            if open > 0 {
                found.push(format!("{open} transactions are left"));
            }
        }
        for (process, it) in self.processes.iter().enumerate() {
            let (held, tasks) = (
                it.leases.as_ref().map_or(0, |it| it.health().held),
                it.runtime.as_ref().map_or(0, |it| it.metrics().num_alive_tasks()),
            );
            // The task that renews leases.
            if held > 0 || tasks > 1 {
                found.push(format!("p{process} still renews {held} leases, and {tasks} tasks are left"));
            }
            let left = it.clerk.iter().filter(|_| it.runtime.is_some()).flat_map(Clerk::left);
            found.extend(left.map(|it| format!("p{process} has {it}")));
        }
        for what in found {
            self.world.lock().violation(what);
        }
        self.world.lock().store.declare_new();
    }

    fn is_of_stock(&self) -> bool {
        self.plan.settings.kind == Kind::Stock
    }

    /// Every process gets every lease soon, or everything of the stocks and rows.
    fn probe(&mut self) {
        for process in 0..self.processes.len() {
            let probing = self.inside(process, |run, runtime| {
                let task = run.task(process);
                if run.is_of_stock() { runtime.spawn(task.clerk.probes()) } else { runtime.spawn(probe(task)) }
            });
            let Some(probing) = probing else { continue };
            let at = self.world.lock().now + PROBE;
            self.drive(at);
            if !probing.is_finished() {
                self.world.lock().violation(format!("p{process} does not get what is free"));
            }
        }
        let mut world = self.world.lock();
        world.check_data();
        world.check_books();
    }

    fn end(mut self) -> Outcome {
        let handles: Vec<_> = {
            let mut world = self.world.lock();
            (0..self.processes.len())
                .flat_map(|process| {
                    world.places[process].generation += 1;
                    world.judge.killed(process)
                })
                .collect()
        };
        for it in &mut self.processes {
            drop(it.runtime.take());
            (it.leases, it.clerk) = (None, None);
        }
        drop(handles);
        let mut world = self.world.lock();
        Outcome {
            violations: std::mem::take(&mut world.judge.violations),
            counts: world.counts,
            digest: world.digest,
            timeline: world.take_timeline(),
        }
    }
}

async fn probe(Task { world, process, leases, .. }: Task) {
    let wait = 10 * PROBE_LIMIT;
    let requests = [
        ("a", leases.lease("a")),
        ("b", leases.lease("b")),
        ("f", leases.lease("f").fair()),
        ("d for reading", leases.rw("d").read()),
        ("d for writing", leases.rw("d").write()),
        ("s", leases.semaphore("s", 3)),
    ];
    for (name, request) in requests {
        let began = Instant::now();
        let acquired = request.wait(wait).acquire().await;
        let took = began.elapsed();
        let err = match acquired {
            Ok(lease) => lease.release().await.err(),
            Err(err) => Some(err),
        };
        if err.is_some() || took > PROBE_LIMIT {
            let what = format!("p{process} got the free lease `{name}` after {took:?}, error {err:?}");
            world.lock().violation(what);
        }
    }
}
