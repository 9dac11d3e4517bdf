//! A process's client of a store with sessions, as far as leases notice it: it keeps the session alive, ends claims at
//! their ttl, gives up those whose callers have gone, and opens another session when one has expired.
//!
//! Its requests arrive in their order, over one connection. A request that gets no answer ends the connection.

use std::{collections::BTreeMap, time::Duration};

use lockkit::{
    Key,
    store::{Answer, Claim, Token},
};
use tokio::sync::oneshot;

use crate::{
    plan::{Bug, Kind, Link},
    sessions::{SessionId, Sessions, is_granted},
    store::{Reply, Request},
    world::{Call, Event, Outcome, World},
};

/// Pause before a request whose answer was lost is sent again, in microseconds.
const PAUSE: u64 = 50_000;

/// How long a place is kept that no request mentions, in microseconds.
const FORGOTTEN: u64 = 5_000_000;

/// What a client does at a time.
#[derive(Debug, Clone)]
pub(crate) enum Timer {
    /// Gives a sign of life.
    Ping,
    /// Ends the claim, if its time is over.
    End(Token),
    /// Sends this request of its own again.
    Again(Request),
}

/// The client of one process.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    /// `None` while there is no session, or no connection.
    session: Option<SessionId>,
    is_connected: bool,
    /// When the last answer was received.
    heard: u64,
    /// Until when the session is known to live, in etcd.
    known_until: u64,
    stopped: u64,
    /// When the process went on for the last time, and until when the session may expire although a request of it was
    /// answered: the leader has not learned that the process has gone on.
    woken: u64,
    doubted_until: u64,
    reports_every: Option<u64>,
    claims: BTreeMap<Token, Local>,
    /// Calls that wait for a session, and events of the time in which the process was stopped.
    parked: Vec<(Request, oneshot::Sender<Option<Reply>>)>,
    deferred: Vec<Event>,
}

/// A claim that has a place.
#[derive(Debug)]
struct Local {
    key: Key,
    until: u64,
    /// Since when it is being given up.
    given_up: Option<u64>,
}

/// What becomes of a call.
pub(crate) enum Prepared {
    Send(Request, oneshot::Sender<Option<Reply>>),
    Answer(Reply, oneshot::Sender<Option<Reply>>),
    Parked,
}

impl Agent {
    /// A request that was sent at this time has told the leader that the session lives. After a stop, one that was sent
    /// before may have told it too long ago.
    fn leader_heard(&mut self, sent: u64) {
        if sent >= self.woken {
            self.doubted_until = 0;
        }
    }

    pub(crate) fn session(&self) -> Option<SessionId> {
        self.session
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl World {
    /// A process has started, and has a session.
    pub(crate) fn starts_agent(&mut self, process: usize) {
        let (id, is_follower) = (self.number(), self.random.bool());
        let Some(sessions) = &mut self.sessions else { return };
        let reports_every = (is_follower && self.settings.kind == Kind::ZooKeeper).then_some(sessions.timeout / 4);
        sessions.opens(id, reports_every, self.now);
        let (expires, every) = (self.now + sessions.timeout, ping_every(sessions, self.settings.kind));
        self.places[process].agent = Agent {
            session: Some(id),
            is_connected: true,
            heard: self.now,
            known_until: expires,
            reports_every,
            ..Agent::default()
        };
        self.plan(expires, Event::SessionEnds(id));
        self.plan_timer(process, self.now + every, Timer::Ping);
    }

    fn plan_timer(&mut self, process: usize, at: u64, timer: Timer) {
        let generation = self.places[process].generation;
        self.plan(at, Event::Agent { process, generation, timer });
    }

    /// A request of the client itself.
    fn sends_own(&mut self, process: usize, request: Request) {
        let now = self.now;
        self.transmit(process, request, None, now);
    }

    /// What becomes of a call of the process at this time.
    pub(crate) fn prepares(
        &mut self,
        process: usize,
        request: Request,
        answer: oneshot::Sender<Option<Reply>>,
        at: u64,
    ) -> Prepared {
        let is_doubtful = self.settings.kind == Kind::ZooKeeper && self.settings.bug != Some(Bug::TrustsAfterSilence);
        let agent = &mut self.places[process].agent;
        match &request {
            Request::Renew(renewals) => {
                let mut is_any = false;
                for renewal in renewals {
                    if let Some(it) = agent.claims.get_mut(&renewal.token).filter(|it| it.until > at) {
                        it.until = it.until.max(at + micros(renewal.ttl));
                        is_any = true;
                    }
                }
                if agent.session.is_none() || !is_any {
                    return Prepared::Answer(Reply::Answers(vec![Answer::Gone; renewals.len()]), answer);
                }
            }
            // A lease that is ended already.
            Request::Release(releases)
                if releases.iter().all(|it| agent.claims.get(&it.token).is_some_and(|it| it.until <= at)) =>
            {
                return Prepared::Answer(Reply::Answers(vec![Answer::Gone; releases.len()]), answer);
            }
            Request::Acquire(claims) if is_doubtful && at < agent.doubted_until => {
                let left: Vec<_> = claims.iter().filter(|it| agent.claims.contains_key(&it.token)).cloned().collect();
                for Claim { key, token, .. } in left {
                    self.takes_back(process, &key, token);
                }
                return Prepared::Answer(Reply::Unknown, answer);
            }
            Request::Acquire(claims) => {
                for Claim { token, ttl, .. } in claims {
                    match agent.claims.get_mut(token) {
                        Some(it) if it.given_up.is_some() => return Prepared::Answer(Reply::Unknown, answer),
                        Some(it) => it.until = it.until.max(at + micros(*ttl)),
                        None => {}
                    }
                }
            }
            _ => {}
        }
        if agent.session.is_none() || !agent.is_connected {
            agent.parked.push((request, answer));
            return Prepared::Parked;
        }
        Prepared::Send(request, answer)
    }

    /// Whether a claim to etcd must extend its session, so that it lives for the ttl.
    pub(crate) fn extends_session(&self, process: usize, request: &Request, at: u64) -> bool {
        match request {
            _ if self.settings.kind != Kind::Etcd => false,
            Request::Ping | Request::Renew(_) => true,
            Request::Acquire(claims) => {
                claims.iter().any(|it| at + micros(it.ttl) > self.places[process].agent.known_until)
            }
            _ => false,
        }
    }

    /// A request arrives at the servers. `None` if its session has ended.
    pub(crate) fn reaches_servers(&mut self, call: &Call) -> Option<Reply> {
        let (now, id) = (self.now, call.session);
        let sessions = self.sessions.as_mut()?;
        sessions.end_min_holds(now);
        if let Request::Open(id) = call.request {
            sessions.opens(id, self.places[call.process].agent.reports_every, now);
            let expires = now + sessions.timeout;
            self.plan(expires, Event::SessionEnds(id));
            return Some(Reply::Done);
        }
        sessions.expires(id)?;
        if let Some(reported) = sessions.touches(id, now) {
            self.plan(reported, Event::Reports(id));
        }
        let sessions = self.sessions.as_mut()?;
        if call.extends || matches!(call.request, Request::Connect) {
            sessions.extends(id, now);
        }
        let reply = sessions.execute(id, &call.request, now);
        if let Request::Release(releases) = &call.request {
            for release in releases.iter().filter(|it| !it.min_hold.is_zero()) {
                self.plan(now + micros(release.min_hold), Event::MinHoldEnds);
            }
        }
        reply
    }

    /// The client receives the answer to a call, or learns that there will be none. Returns what the caller gets.
    pub(crate) fn hears(&mut self, process: usize, call: &Call) -> Reply {
        let (now, sent) = (self.now, call.sent);
        let is_gone = call.answer.as_ref().is_none_or(oneshot::Sender::is_closed);
        let agent = &mut self.places[process].agent;
        let reply = match call.outcome {
            Outcome::Answered => call.reply.clone(),
            Outcome::Broken | Outcome::Silent => None,
        };
        let Some(mut reply) = reply else {
            match &call.request {
                Request::Acquire(claims) => claims.iter().for_each(|it| self.takes_back(process, &it.key, it.token)),
                Request::GiveUp { .. } | Request::Open(_) | Request::Connect => {
                    self.plan_timer(process, now + PAUSE, Timer::Again(call.request.clone()));
                }
                _ => {}
            }
            self.breaks_connection(process, Some(call.session));
            return Reply::Unknown;
        };
        agent.heard = now;
        if matches!(reply, Reply::Expired) {
            self.loses_session(process, call.session);
            return Reply::Unknown;
        }
        if call.extends {
            let timeout = self.sessions.as_ref().map_or(0, |it| it.timeout);
            agent.known_until = agent.known_until.max(sent + timeout);
        }
        match &call.request {
            Request::Open(id) => {
                (agent.session, agent.is_connected, agent.known_until) = (Some(*id), true, sent);
                agent.heard = now;
                agent.leader_heard(sent);
                self.sends_parked(process);
            }
            Request::Connect => {
                agent.is_connected = true;
                agent.leader_heard(sent);
                self.sends_parked(process);
            }
            Request::Acquire(claims) if agent.session == Some(call.session) => {
                for Claim { key, token, ttl, queue, .. } in claims {
                    let until = if is_granted(&reply) {
                        sent + micros(*ttl)
                    } else if *queue {
                        now + micros(*ttl).max(FORGOTTEN)
                    } else {
                        continue;
                    };
                    let claim = Local { key: key.clone(), until, given_up: None };
                    self.places[process].agent.claims.insert(*token, claim);
                    self.plan_timer(process, until, Timer::End(*token));
                    if is_gone {
                        self.takes_back(process, key, *token);
                    }
                }
            }
            Request::Acquire(_) => reply = Reply::Unknown,
            Request::Renew(renewals) => {
                if let Reply::Answers(answers) = &mut reply {
                    for (renewal, answer) in renewals.iter().zip(answers) {
                        if !agent.claims.contains_key(&renewal.token) {
                            *answer = Answer::Gone;
                        }
                    }
                }
            }
            Request::Release(releases) => {
                for release in releases {
                    agent.claims.remove(&release.token);
                }
            }
            Request::GiveUp { token, created_by, .. }
                if agent.claims.get(token).is_some_and(|it| it.given_up == Some(*created_by)) =>
            {
                agent.claims.remove(token);
            }
            _ => {}
        }
        reply
    }

    fn takes_back(&mut self, process: usize, key: &Key, token: Token) {
        let now = self.now;
        let claim = Local { key: key.clone(), until: now, given_up: Some(now) };
        self.places[process].agent.claims.insert(token, claim);
        self.sends_own(process, Request::GiveUp { key: key.clone(), token, created_by: now });
    }

    fn sends_parked(&mut self, process: usize) {
        for (request, answer) in std::mem::take(&mut self.places[process].agent.parked) {
            if !answer.is_closed() {
                let (generation, now) = (self.places[process].generation, self.now);
                self.send_at(process, generation, request, answer, now);
            }
        }
    }

    /// The client leaves its connection, and opens another one.
    pub(crate) fn breaks_connection(&mut self, process: usize, session: Option<SessionId>) {
        let agent = &mut self.places[process].agent;
        let Some(id) = agent.session.filter(|it| session.is_none_or(|of| of == *it)) else { return };
        if self.settings.kind != Kind::ZooKeeper || !std::mem::replace(&mut agent.is_connected, false) {
            return;
        }
        self.log("agent", || format!("p{process} leaves its connection"));
        if self.random.bool()
            && let Some(sessions) = &mut self.sessions
        {
            sessions.loses_report(id);
        }
        self.break_calls(|it| it.process == process && it.session == id);
        self.sends_own(process, Request::Connect);
    }

    fn loses_session(&mut self, process: usize, session: SessionId) {
        let agent = &mut self.places[process].agent;
        if agent.session != Some(session) {
            return;
        }
        (agent.session, agent.is_connected) = (None, false);
        agent.claims.clear();
        self.log("agent", || format!("p{process} learns that its session has expired"));
        let id = self.number();
        self.sends_own(process, Request::Open(id));
    }

    pub(crate) fn has_timer(&mut self, process: usize, timer: Timer) {
        let (now, kind) = (self.now, self.settings.kind);
        let Some(sessions) = &mut self.sessions else { return };
        let (every, silence) = (ping_every(sessions, kind), sessions.timeout * 3 / 8);
        let is_good = self.places[process].link == Link::GOOD;
        let agent = &mut self.places[process].agent;
        match timer {
            Timer::Ping => {
                let is_silent = kind == Kind::ZooKeeper && now >= agent.heard + silence;
                let mut next = now + every;
                if kind == Kind::ZooKeeper && agent.is_connected && !is_silent {
                    next = next.min(agent.heard + silence);
                }
                if is_silent {
                    self.breaks_connection(process, None);
                } else if let Some(id) = agent.session.filter(|it| sessions.expires(*it).is_some())
                    && (is_good && agent.is_connected)
                {
                    // As if it took no time, which saves two thirds of the events of a run.
                    agent.heard = now;
                    if kind == Kind::Etcd {
                        sessions.extends(id, now);
                        agent.known_until = now + sessions.timeout;
                    } else if let Some(reported) = sessions.touches(id, now) {
                        self.plan(reported, Event::Reports(id));
                    }
                } else if agent.session.is_some() && agent.is_connected {
                    self.sends_own(process, Request::Ping);
                }
                self.plan_timer(process, next, Timer::Ping);
            }
            Timer::End(token) => match agent.claims.get(&token) {
                Some(it) if it.given_up.is_some() => {}
                Some(it) if it.until > now => {
                    let until = it.until;
                    self.plan_timer(process, until, Timer::End(token));
                }
                Some(it) => {
                    let key = it.key.clone();
                    self.takes_back(process, &key, token);
                }
                None => {}
            },
            Timer::Again(request) => {
                let is_needed = match &request {
                    Request::GiveUp { token, created_by, .. } => {
                        agent.claims.get(token).is_some_and(|it| it.given_up == Some(*created_by))
                    }
                    Request::Open(_) => agent.session.is_none(),
                    Request::Connect => agent.session.is_some() && !agent.is_connected,
                    _ => false,
                };
                if is_needed {
                    self.sends_own(process, request);
                }
            }
        }
    }

    /// The process is stopped, and its client with it.
    pub(crate) fn stops_agent(&mut self, process: usize) {
        self.places[process].agent.stopped = self.now;
    }

    /// The time that the process has noticed: when it goes on after a stop, an answer and the end of its time come at
    /// once, within 1 ms.
    pub(crate) fn noticed(&self, process: usize, at: u64) -> u64 {
        let Agent { stopped, woken, .. } = self.places[process].agent;
        if at < woken + 1000 { stopped } else { at }
    }

    /// Keeps an event for the time when the process goes on. Returns it if the process runs.
    pub(crate) fn defers(&mut self, event: Event) -> Option<Event> {
        let process = match &event {
            Event::Agent { process, .. } | Event::Freed { process, .. } => Some(*process),
            Event::IsAnswered { call } => self.process_of(*call),
            _ => None,
        };
        let place = process.and_then(|it| self.places.get_mut(it)).filter(|it| it.is_stopped);
        let Some(place) = place.filter(|_| self.sessions.is_some()) else { return Some(event) };
        place.agent.deferred.push(event);
        None
    }

    /// The process goes on. If something has arrived meanwhile, its client does not notice that it was silent for long.
    pub(crate) fn wakes_agent(&mut self, process: usize) {
        let now = self.now;
        self.places[process].agent.woken = now;
        let Some(sessions) = &self.sessions else { return };
        let (timeout, kind) = (sessions.timeout, self.settings.kind);
        let deferred = std::mem::take(&mut self.places[process].agent.deferred);
        let has_heard = deferred.iter().any(|it| match it {
            Event::IsAnswered { call } => self.is_answered(*call),
            other => matches!(other, Event::Freed { .. }),
        });
        for event in deferred {
            self.plan(now, event);
        }
        let agent = &mut self.places[process].agent;
        if kind != Kind::ZooKeeper {
            return;
        }
        if now - agent.stopped > timeout * 5 / 24 {
            agent.doubted_until = now + timeout * 5 / 12;
        }
        if has_heard {
            agent.heard = now;
        } else if now >= agent.heard + timeout / 3 {
            self.breaks_connection(process, None);
        }
    }
}

fn ping_every(sessions: &Sessions, kind: Kind) -> u64 {
    if kind == Kind::Etcd { sessions.timeout / 5 } else { sessions.timeout / 6 }
}

/// The link of a connection of a session: what is slow is bounded by the silence after which its client leaves it.
pub(crate) fn of_session(link: Link, timeout: u64) -> Link {
    Link { slow_us: link.slow_us.min(timeout / 16), repeated: 0.0, ..link }
}
