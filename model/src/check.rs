//! Runs a model in its scopes, and the bugs that are planted in it.

use std::{
    fmt::{Debug, Write},
    hash::Hash,
};

use stateright::{Checker, CheckerBuilder, Expectation, HasDiscoveries, Model};

/// A protocol that is checked in several scopes.
pub trait Protocol:
    Model<State: Clone + Debug + PartialEq + Hash + Send + Sync, Action: Clone + Debug + PartialEq + Send>
    + Clone
    + Send
    + Sync
    + 'static
{
    /// A bug that can be planted.
    type Bug: Copy + Debug + 'static;

    /// The scopes.
    fn scopes() -> Vec<Scope<Self>>;

    /// The same model with a bug.
    #[must_use]
    fn with(self, bug: Self::Bug) -> Self;
}

/// A model with bounds, and what is expected of it.
#[derive(Clone, Debug)]
pub struct Scope<M: Protocol> {
    /// Its name.
    pub name: &'static str,
    /// The model with its bounds.
    pub model: M,
    /// The properties that the real protocol does not have here. Each is broken in some run.
    pub limits: &'static [&'static str],
    /// Each breaks a property that the real protocol has here.
    pub bugs: &'static [M::Bug],
}

/// A run that breaks a property.
#[derive(Clone, Debug)]
pub struct Broken {
    /// The property.
    pub property: &'static str,
    /// A shortest run that breaks it.
    pub actions: Vec<String>,
}

/// What was found in the states of a model.
#[derive(Clone, Debug)]
pub struct Found {
    /// How many states were looked at.
    pub states: usize,
    /// In the order of the properties.
    pub broken: Vec<Broken>,
    /// What should happen in some run, and happens in none.
    pub never: Vec<&'static str>,
}

/// Looks at all states.
pub fn explore<M: Protocol>(model: M) -> Found {
    find(model.checker(), HasDiscoveries::All)
}

/// Plants the bug, and looks at states until a property is broken that the scope has.
pub fn hunt<M: Protocol>(scope: &Scope<M>, bug: M::Bug) -> Option<Broken> {
    let model = scope.model.clone().with(bug);
    let names = model.properties().into_iter().filter(|it| matches!(it.expectation, Expectation::Always));
    let until = names.map(|it| it.name).filter(|it| !scope.limits.contains(it)).collect();
    let mut broken = find(model.checker(), HasDiscoveries::AnyOf(until)).broken;
    broken.retain(|it| !scope.limits.contains(&it.property));
    broken.into_iter().min_by_key(|it| it.actions.len())
}

fn find<M: Protocol>(checker: CheckerBuilder<M>, until: HasDiscoveries) -> Found {
    // With one thread, the runs that are found are the shortest ones, and the same each time.
    let checker = checker.threads(1).finish_when(until).spawn_bfs().join();
    let mut found = Found { states: checker.unique_state_count(), broken: Vec::new(), never: Vec::new() };
    let mut discoveries = checker.discoveries();
    for property in checker.model().properties() {
        match (property.expectation, discoveries.remove(property.name)) {
            (Expectation::Sometimes, None) => found.never.push(property.name),
            (Expectation::Always, Some(path)) => {
                let actions = path.into_actions().iter().map(|it| format!("{it:?}")).collect();
                found.broken.push(Broken { property: property.name, actions });
            }
            _ => {}
        }
    }
    found
}

/// The tables of a model in `README.md`.
///
/// # Panics
/// If the real protocol lacks a property that is no limit of the scope or has one that is, or a bug breaks nothing.
pub fn tables<M: Protocol>() -> String {
    let mut scopes = "| scope | states | broken by the real protocol |\n|---|---|---|\n".to_owned();
    let mut bugs = "| bug | scope | breaks | after actions |\n|---|---|---|---|\n".to_owned();
    for scope in M::scopes() {
        let name = scope.name;
        let Found { states, broken, never } = explore(scope.model.clone());
        assert!(never.is_empty(), "{name}: in no run {never:?}");
        let found: Vec<_> = broken.iter().map(|it| it.property).collect();
        assert_eq!(found, scope.limits, "{name}: {broken:#?}");
        let limits = broken.iter().map(|it| format!("{} (after {})", it.property, it.actions.len()));
        let limits = if broken.is_empty() { "nothing".to_owned() } else { limits.collect::<Vec<_>>().join(", ") };
        line(&mut scopes, format_args!("| {name} | {states} | {limits} |"));
        for bug in scope.bugs {
            let Some(Broken { property, actions }) = hunt(&scope, *bug) else {
                panic!("{name}: {bug:?} breaks nothing")
            };
            line(&mut bugs, format_args!("| `{bug:?}` | {name} | {property} | {} |", actions.len()));
        }
    }
    format!("{scopes}\n{bugs}")
}

fn line(text: &mut String, line: std::fmt::Arguments) {
    writeln!(text, "{line}").expect("BUG: writing to a text");
}

/// The shortest run in which the bug of this name breaks a property, an action a line.
pub fn run_of<M: Protocol>(name: &str) -> Option<String> {
    let scopes = M::scopes();
    let (scope, bug) = scopes
        .iter()
        .find_map(|scope| scope.bugs.iter().find(|it| format!("{it:?}") == name).map(|bug| (scope, *bug)))?;
    let Broken { property, actions } = hunt(scope, bug)?;
    Some(format!("{property}, in {}:\n{}\n", scope.name, actions.join("\n")))
}
