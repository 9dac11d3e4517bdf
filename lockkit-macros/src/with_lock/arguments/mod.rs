//! What is known about each argument of `#[with_lock(…)]`. Parsing, checks, suggestions and documentation read the one
//! [table](table::ARGUMENTS).

mod table;

use crate::{
    diagnostics::{Known, list, meant},
    with_lock::{forms::Form, strategy::Strategy},
};

pub(crate) use table::ARGUMENTS;

/// One argument.
pub(crate) struct Argument {
    pub(crate) name: &'static str,
    /// How to write it, for errors that say so.
    pub(crate) example: &'static str,
    pub(crate) form: Form,
    /// The strategies that take it, each with its cell of the documentation.
    taken_by: &'static [(Strategy, &'static str)],
    /// Strategies that do not take it for a reason of their own, with the error that says why.
    refused_by: &'static [(Strategy, &'static str)],
    /// What other libraries call it.
    pub(crate) other_names: &'static [&'static str],
    /// How the documentation writes it.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the test that writes the documentation"))]
    written: &'static str,
    /// What the documentation says about it.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the test that writes the documentation"))]
    meaning: &'static str,
}

impl Argument {
    /// The argument of that name.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        ARGUMENTS.iter().find(|it| it.name == name)
    }

    /// The name of the argument that was probably meant: in other case, misspelt, or as another library calls it.
    pub(crate) fn meant(word: &str) -> Option<&'static str> {
        let known: Vec<Known> = ARGUMENTS.iter().map(|it| (it.name, it.other_names)).collect();
        meant(word, &known)
    }

    /// The names of the arguments that the strategy takes; of all, where it is not known.
    pub(crate) fn all_of(strategy: Option<Strategy>) -> String {
        let taken = ARGUMENTS.iter().filter(|it| strategy.is_none_or(|strategy| it.is_taken_by(strategy)));
        list(&taken.map(|it| it.name).collect::<Vec<_>>(), "and")
    }

    /// The strategies that take it.
    pub(crate) fn strategies(&self) -> Vec<&'static str> {
        self.taken_by.iter().map(|(strategy, _)| strategy.word()).collect()
    }

    pub(crate) fn is_taken_by(&self, strategy: Strategy) -> bool {
        self.taken_by.iter().any(|(it, _)| *it == strategy)
    }

    /// Why the strategy does not take it, where it has a reason of its own.
    pub(crate) fn refusal(&self, strategy: Strategy) -> Option<&'static str> {
        self.refused_by.iter().find(|(it, _)| *it == strategy).map(|(_, message)| *message)
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs, path::Path};

    use super::*;
    use crate::{diagnostics::Errors, with_lock::args::Args};

    /// Which strategy takes which argument, and what each is, as the documentation has it.
    fn table() -> String {
        let strategies = Strategy::ALL.map(|it| format!("`{it}`")).join(" | ");
        let mut lines = vec![format!("| argument | {strategies} |"), "|---".repeat(1 + Strategy::ALL.len()) + "|"];
        for Argument { taken_by, written, .. } in ARGUMENTS {
            let cell = |strategy| taken_by.iter().find(|(it, _)| *it == strategy).map_or("–", |(_, cell)| cell);
            lines.push(format!("| {written} | {} |", Strategy::ALL.map(cell).join(" | ")));
        }
        lines.push(String::new());
        for Argument { written, meaning, .. } in ARGUMENTS {
            let mut line = "-".to_owned();
            for word in format!("{written}: {meaning}").split(' ') {
                if line.chars().count() + word.chars().count() >= 120 {
                    lines.push(std::mem::replace(&mut line, " ".to_owned()));
                }
                line.push(' ');
                line.push_str(word);
            }
            lines.push(line);
        }
        lines.join("\n") + "\n"
    }

    /// Run it with `ARGUMENTS_MD=overwrite` after a change of the arguments.
    #[test]
    fn the_documented_table_is_that_of_the_arguments() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/with_lock/arguments/table.md");
        if env::var_os("ARGUMENTS_MD").is_some_and(|it| it == "overwrite") {
            fs::write(&path, table()).expect("write the table");
        }
        assert_eq!(fs::read_to_string(&path).expect("read the table"), table());
    }

    #[test]
    fn a_slip_of_the_finger_is_understood() {
        for (slip, known) in [
            ("wiat", "wait"),
            ("atempts", "attempts"),
            ("onbusy", "on_busy"),
            ("tabel", "table"),
            ("kyes", "keys"),
            ("fiar", "fair"),
            ("Key", "key"),
        ] {
            assert_eq!(Argument::meant(slip), Some(known));
        }
        assert_eq!(Argument::meant("colour"), None);
    }

    #[test]
    fn a_word_of_other_libraries_is_understood() {
        for argument in ARGUMENTS {
            for other in argument.other_names {
                assert!(Argument::named(other).is_none(), "{other}");
                assert_eq!(Argument::meant(other), Some(argument.name));
            }
        }
    }

    #[test]
    fn every_example_sets_a_field_of_its_own() {
        for Argument { name, example, .. } in ARGUMENTS {
            let tokens = format!("lease, {example}").parse().expect("tokens");
            let mut errors = Errors::default();
            let mut args = Args::parse(tokens, &mut errors);
            assert!(errors.is_empty(), "{}", errors.into_tokens());
            let set: Vec<_> = args.given().into_iter().map(|(argument, _)| argument.name).collect();
            assert_eq!(set, [*name]);
        }
    }

    #[test]
    fn every_entry_is_whole() {
        for Argument { name, example, taken_by, refused_by, written, .. } in ARGUMENTS {
            assert_eq!(ARGUMENTS.iter().filter(|it| it.name == *name).count(), 1, "{name} is there once");
            assert!(example.starts_with(name) && written.starts_with(&format!("`{name}")), "{name}");
            assert!(!taken_by.is_empty(), "{name} belongs to a strategy");
            let strategies = || taken_by.iter().chain(*refused_by).map(|(it, _)| *it);
            let count = |strategy| strategies().filter(|it| *it == strategy).count();
            assert!(Strategy::ALL.into_iter().all(|it| count(it) <= 1), "{name} names a strategy once");
            let order = |it: &Strategy| Strategy::ALL.iter().position(|other| other == it);
            assert!(taken_by.iter().map(|(it, _)| order(it)).is_sorted(), "{name} lists them in their order");
        }
    }
}
