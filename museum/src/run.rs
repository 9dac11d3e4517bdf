//! The record of one run: a line a step. What is printed and drawn is made from it alone.

#[derive(Debug, Default)]
pub(crate) struct Run {
    /// The participants, in the order of their columns.
    pub(crate) names: Vec<&'static str>,
    /// What `Line::state` is the state of.
    pub(crate) state_title: &'static str,
    pub(crate) lines: Vec<Line>,
}

#[derive(Debug)]
pub(crate) struct Line {
    /// The participant who took the step. `None` if only time passed.
    pub(crate) who: Option<usize>,
    /// The step and its result.
    pub(crate) text: String,
    /// One for each participant.
    pub(crate) cells: Vec<Cell>,
    pub(crate) state: String,
    /// How many participants are inside.
    pub(crate) inside: usize,
    /// What broke with this step.
    pub(crate) breach: Option<String>,
}

/// A participant after a step.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Cell {
    /// What this step did to it, in a word.
    pub(crate) mark: String,
    pub(crate) inside: bool,
    pub(crate) waiting: bool,
}

impl Cell {
    pub(crate) fn text(&self) -> &str {
        match self {
            Self { mark, .. } if !mark.is_empty() => mark,
            Self { inside: true, .. } => "│",
            Self { waiting: true, .. } => "<waiting>",
            _ => "",
        }
    }
}

impl Run {
    /// What broke first, if something did.
    pub(crate) fn breach(&self) -> Option<&str> {
        self.lines.iter().find_map(|it| it.breach.as_deref())
    }
}
