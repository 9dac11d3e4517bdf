//! `docs/safety.md`: each sentence of its lists names what shows it, and all of that exists.

use std::collections::BTreeMap;

use crate::{documents::has_function, tree};

/// The page, and the texts of the repository by their paths.
struct Page<'a> {
    text: &'a str,
    files: &'a BTreeMap<String, String>,
}

/// A link of the page.
#[derive(Debug, PartialEq)]
struct Link<'a> {
    text: &'a str,
    target: &'a str,
}

impl<'a> Page<'a> {
    fn complaints(&self) -> Vec<String> {
        let links = self.links(self.text);
        let mut complaints: Vec<_> = links.iter().filter_map(|link| self.fault(link)).collect();
        let items = self.text.split("\n- ").skip(1).map(|it| it.split("\n\n").next().unwrap_or_default());
        for item in items {
            let links = self.links(item);
            let is_contents = links.first().is_some_and(|it| it.target.starts_with('#'));
            if !is_contents && !links.iter().any(Link::is_evidence) {
                complaints.push(format!("nothing shows this: {item}"));
            }
        }
        complaints
    }

    /// The links of a part of the page: `[text](target)` and `[text][name]`.
    fn links(&self, part: &'a str) -> Vec<Link<'a>> {
        let mut links = Vec::new();
        let mut rest = part;
        while let Some((text, after)) = rest.split_once('[').and_then(|(_, it)| it.split_once(']')) {
            rest = after;
            if let Some((target, after)) = after.strip_prefix('(').and_then(|it| it.split_once(')')) {
                links.push(Link { text, target });
                rest = after;
            } else if let Some((name, after)) = after.strip_prefix('[').and_then(|it| it.split_once(']')) {
                let definition = self.text.lines().find_map(|it| it.strip_prefix(&*format!("[{name}]: ")));
                links.push(Link { text, target: definition.unwrap_or(name) });
                rest = after;
            }
        }
        links
    }

    /// What is wrong with a link.
    fn fault(&self, Link { text, target }: &Link) -> Option<String> {
        let (path, heading) = target.split_once('#').unwrap_or((target, ""));
        let path = match path {
            "" => "docs/safety.md".to_owned(),
            path => path.strip_prefix("../").map_or_else(|| format!("docs/{path}"), str::to_owned),
        };
        let texts: Vec<_> = match self.files.get(&path) {
            Some(text) => vec![text.as_str()],
            None => {
                self.files.iter().filter(|it| it.0.starts_with(&format!("{path}/"))).map(|it| it.1.as_str()).collect()
            }
        };
        if texts.is_empty() {
            return Some(format!("there is no {path}"));
        }
        if let Some(name) = text.strip_prefix('`').and_then(|it| it.strip_suffix('`'))
            && !texts.iter().any(|it| has_function(it, name))
        {
            return Some(format!("{path} has no test `{name}`"));
        }
        let section = section(texts[0], heading);
        let Some(section) = section else { return Some(format!("{path} has no heading #{heading}")) };
        let cell = text.split_once(": ").filter(|it| ["model", "limit", "torture"].contains(&it.0))?.1;
        let is_there = section.lines().any(|line| line.split('|').any(|it| it.trim() == cell));
        (!is_there).then(|| format!("the section {target} has no row of {cell}"))
    }
}

impl Link<'_> {
    /// Whether it shows that a sentence holds.
    fn is_evidence(&self) -> bool {
        ["`", "model: ", "limit: ", "torture: ", "exhibit "].iter().any(|it| self.text.starts_with(it))
    }
}

/// The text below a heading with this anchor, or the whole text without one.
fn section<'t>(text: &'t str, anchor: &str) -> Option<&'t str> {
    if anchor.is_empty() {
        return Some(text);
    }
    let slug = |it: &str| -> String {
        let letters = it.chars().filter(|it| it.is_alphanumeric() || " -_".contains(*it));
        letters.collect::<String>().to_lowercase().replace(' ', "-")
    };
    let mut sections = text.split("\n## ").skip(1);
    sections.find(|it| it.lines().next().is_some_and(|it| slug(it) == anchor))
}

fn files() -> BTreeMap<String, String> {
    [".md", ".rs"].into_iter().flat_map(|ending| tree::files("", ending)).collect()
}

#[test]
fn each_sentence_about_safety_names_what_shows_it() {
    let files = files();
    let complaints = Page { text: &files["docs/safety.md"], files: &files }.complaints();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn the_check_sees_what_is_removed() {
    let files = files();
    let without = |path: &str, old: &str, new: &str| {
        let mut files = files.clone();
        let text = files.remove(path).expect("the file");
        assert!(text.contains(old), "{path} has `{old}`");
        if !new.is_empty() {
            files.insert(path.to_owned(), text.replace(old, new));
        }
        Page { text: &files.get("docs/safety.md").unwrap_or(&String::new()).clone(), files: &files }.complaints()
    };
    let test = "fn a_holder_that_was_stopped_past_its_ttl_cannot_commit";
    assert_eq!(without("tests/integration/processes.rs", test, "fn gone").len(), 1);
    assert_eq!(without("model/README.md", "\n## The fence guard", "\n## Gone").len(), 3);
    assert_eq!(without("model/README.md", "| fences rise |", "| gone |").len(), 2);
    assert_eq!(without("torture/README.md", "| overlap of trust |", "| gone |").len(), 1);
    assert_eq!(without("docs/museum/09-stale-writer.md", "", "").len(), 1);
    assert_eq!(without("docs/safety.md", " [model: lost is for ever][m-table]", " ").len(), 1);
    assert!(!without("docs/safety.md", "[oracle]: ", "[other]: ").is_empty());
}
