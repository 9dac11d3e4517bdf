//! The layers of `lockkit`, as the table in ARCHITECTURE.md has them, and the imports that do not point down them.

use crate::code::{Token, code};

/// The modules of `lockkit`, lowest first. A module knows those of the layers below its own, and no others.
pub(crate) struct Layers(Vec<Layer>);

/// One row of the table: groups of modules. Those of one group know each other all the same.
type Layer = Vec<Vec<String>>;

impl Layers {
    /// The layers in the first column of the table: modules in backticks, parted by commas, or by ↔ where they know
    /// each other.
    pub(crate) fn of(document: &str) -> Self {
        let rows = document.lines().skip_while(|it| !it.starts_with("| in `lockkit/src/` |")).skip(2);
        let rows = rows.map_while(|it| it.strip_prefix("| ")).filter_map(|it| it.split(" | ").next());
        let module = |it: &str| it.trim().trim_matches('`').to_owned();
        let group = |it: &str| it.split('↔').map(module).collect();
        Self(rows.map(|row| row.split(',').map(group).collect()).collect())
    }

    /// All modules that the table names.
    pub(crate) fn modules(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flatten().flatten().map(String::as_str)
    }

    /// Imports that do not point down the layers. `file` is a path from `lockkit/src`.
    pub(crate) fn upward_imports(&self, file: &str, source: &str) -> Vec<String> {
        let path: Vec<_> =
            file.trim_end_matches(".rs").trim_end_matches("/mod").split('/').map(str::to_owned).collect();
        let Some((module, layer)) = self.place_of(&path) else {
            return vec![format!("{file}: it is in no layer: add it to the table of ARCHITECTURE.md")];
        };
        let tokens = code(source);
        let mut complaints = Vec::new();
        for (start, token) in tokens.iter().enumerate() {
            // `$crate` is in a macro, for the code that uses it.
            let in_a_path = start > 0 && [":", "$"].contains(&tokens[start - 1].text.as_str());
            let base = match token.text.as_str() {
                "crate" if !in_a_path => &[],
                "super" if !in_a_path => &path[..path.len() - 1],
                _ => continue,
            };
            if !is_path_separator(&tokens, start + 1) {
                continue;
            }
            let mut used = Vec::new();
            paths(&tokens, &mut (start + 3), base.to_vec(), &mut used);
            for path in used {
                // What is no module is an item that `lib` exports.
                let Some((imported, below)) = self.place_of(&path) else {
                    complaints.push(format!("{file}:{}: `{module}` uses `{}` from `lib`", token.line, path.join("::")));
                    continue;
                };
                if imported != module && below >= layer && !self.are_friends(&module, &imported) && module != "lib" {
                    complaints.push(format!("{file}:{}: `{module}` must not know `{imported}`", token.line));
                }
            }
        }
        complaints
    }

    /// The named module that the path is in, and the number of its layer. The longest name counts: `sql::ident` is not
    /// of `sql`.
    fn place_of(&self, path: &[String]) -> Option<(String, usize)> {
        let is_named = |module: &str| self.0.iter().position(|it| it.iter().flatten().any(|it| it == module));
        (1..=path.len()).rev().find_map(|length| {
            let module = path[..length].join("::");
            is_named(&module).map(|layer| (module, layer))
        })
    }

    fn are_friends(&self, one: &str, other: &str) -> bool {
        self.0.iter().flatten().any(|it| it.iter().any(|it| it == one) && it.iter().any(|it| it == other))
    }
}

fn is_path_separator(tokens: &[Token], at: usize) -> bool {
    let is_colon = |at: usize| tokens.get(at).is_some_and(|it| it.text == ":");
    is_colon(at) && is_colon(at + 1)
}

/// The paths of an import from `at` on: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(tokens: &[Token], at: &mut usize, mut path: Vec<String>, found: &mut Vec<Vec<String>>) {
    loop {
        match tokens.get(*at).map(|it| it.text.as_str()) {
            Some("{") => {
                *at += 1;
                while tokens[*at].text != "}" {
                    paths(tokens, at, path.clone(), found);
                    while tokens[*at].text != "," && tokens[*at].text != "}" {
                        *at += 1;
                    }
                    if tokens[*at].text == "," {
                        *at += 1;
                    }
                }
                *at += 1;
                return;
            }
            Some("super") => drop(path.pop()),
            Some(name) => path.push(name.to_owned()),
            None => return,
        }
        *at += 1;
        if !is_path_separator(tokens, *at) {
            found.push(path);
            return;
        }
        *at += 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "
# Title
| in `lockkit/src/` | what it is |
|---|---|
| `error` ↔ `key` | one, two |
| `policy`, `sql::ident` | three |
| `lease::store` | four |
| `lease`, `sql::row`, `sql::named` | five |
| `sql` | six |
| `lib` | seven |

| `other` | not of the table |
";

    #[test]
    fn the_table_is_read() {
        let layers = Layers::of(DOCUMENT);
        let modules: Vec<_> = layers.modules().collect();
        let expected =
            ["error", "key", "policy", "sql::ident", "lease::store", "lease", "sql::row", "sql::named", "sql", "lib"];
        assert_eq!(modules, expected);
    }

    #[test]
    fn planted_upward_imports_are_seen() {
        let complaints = |file: &str, source: &str| Layers::of(DOCUMENT).upward_imports(file, source).len();

        assert_eq!(complaints("key.rs", "use crate::sql::Dialect;"), 1);
        assert_eq!(complaints("policy.rs", "use crate::{error::{Error, Result}, sql::row::RowLock};"), 1);
        assert_eq!(complaints("policy.rs", "use crate::sql::ident::Ident;"), 1);
        assert_eq!(complaints("lease/wait.rs", "fn f() -> crate::sql::tx::Tx { crate::sql::f() }"), 2);
        assert_eq!(complaints("lease/store.rs", "use super::keeper;"), 1);
        assert_eq!(complaints("lease/held.rs", "use crate::Lease;"), 1);
        assert_eq!(complaints("sql/row/mod.rs", "use super::{named::NamedLock, row::RowLock};"), 1);
        assert_eq!(complaints("lease/held.rs", "use super::super::sql::Dialect;"), 1);
        assert_eq!(complaints("helpers.rs", ""), 1);
    }

    #[test]
    fn downward_imports_and_tests_pass() {
        let complaints = |file: &str, source: &str| Layers::of(DOCUMENT).upward_imports(file, source);
        let none: [String; 0] = [];

        assert_eq!(complaints("key.rs", "use crate::error::{Error, Result};"), none);
        assert_eq!(complaints("sql/tx.rs", "use crate::{sql::{row::By, RowOps}, policy::Wait as W};"), none);
        assert_eq!(complaints("lease/held.rs", "use super::{BUSY_PAUSE, request::X}; pub(crate) fn f() {}"), none);
        assert_eq!(complaints("sql/mysql.rs", "use super::Dialect; fn f() { super::held() }"), none);
        assert_eq!(complaints("key.rs", "#[cfg(test)] mod tests { use crate::sql::X; } // crate::sql"), none);
        assert_eq!(complaints("key.rs", "/// See [`begin`](crate::begin).\nstruct Key;"), none);
    }
}
