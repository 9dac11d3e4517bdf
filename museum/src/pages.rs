//! The pages in `docs/museum`, made from the runs.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{
    exhibit::{Exhibit, Shows},
    picture::picture,
    text::{Style, timeline, wrapped},
};

const INTRODUCTION: [&str; 3] = [
    "Many recipes for locks are broken. Each page shows one: the recipe, a run in which it breaks, what its usual \
     remedy misses, and the same schedule with lockkit. You need not know Rust.",
    "A, B and C are processes, or customers whose requests run at the same time. A participant is *inside* from taking \
     a lock until it is done, and at most one may be inside. `<waiting>` marks a step that has begun and cannot finish \
     yet. A schedule decides whose step is next and how much time passes, so every run is the same. The recipes run \
     on a small model of Redis and on SQLite; lockkit is the real library.",
    "`all` fails if a recipe no longer breaks, or if lockkit does. A test compares these pages with the runs.",
];

/// Where the pages are.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/museum")
}

/// The names of the files with their texts.
pub(crate) fn pages(exhibits: &[Exhibit], shows: &[Shows]) -> Vec<(String, String)> {
    let mut pages = vec![("README.md".to_owned(), index(exhibits, shows))];
    for (at, (exhibit, shows)) in exhibits.iter().zip(shows).enumerate() {
        pages.push((format!("{}.md", exhibit.slug), page(at + 1, exhibit, shows)));
        pages.push((format!("{}.svg", exhibit.slug), picture(shows)));
    }
    pages
}

/// Writes all of them.
pub(crate) fn write(exhibits: &[Exhibit], shows: &[Shows]) -> Result<()> {
    let folder = folder();
    fs::create_dir_all(&folder)?;
    for (file, text) in pages(exhibits, shows) {
        fs::write(folder.join(&file), text).with_context(|| format!("write {file}"))?;
    }
    Ok(())
}

fn index(exhibits: &[Exhibit], shows: &[Shows]) -> String {
    let introduction = INTRODUCTION.map(|it| wrapped(it, 120)).join("\n");
    let mut text = format!(
        "# The museum of broken locks\n\n{introduction}\n\
         ```text\n\
         cargo run -p museum              # the list\n\
         cargo run -p museum 5            # one exhibit\n\
         cargo run -p museum all          # all of them, in a few seconds\n\
         ```\n\n\
         | exhibit | what breaks |\n|---|---|\n"
    );
    for (at, (exhibit, shows)) in exhibits.iter().zip(shows).enumerate() {
        let Exhibit { slug, title, .. } = exhibit;
        let breach = shows.broken.breach().unwrap_or_default();
        let _ = writeln!(text, "| {}. [{title}]({slug}.md) | {breach} |", at + 1);
    }
    let recipes = "[recipes.md](recipes.md) lists 45 recipes, what is wrong with each, and the exhibit or test that \
                   shows it.";
    text + "\n" + recipes + "\n"
}

fn page(number: usize, exhibit: &Exhibit, shows: &Shows) -> String {
    let Exhibit { slug, title, recipe, happens, remedy, lockkit, more: (topic, address), .. } = exhibit;
    let source = slug.split_once('-').map_or(*slug, |it| it.1).replace('-', "_");
    let (happens, lockkit) = (wrapped(happens, 120), wrapped(lockkit, 120));
    let remedy = wrapped(&format!("**What the usual remedy misses.** {remedy}"), 120);
    let (broken, cured) = (timeline(&shows.broken, Style::Plain), timeline(&shows.cured, Style::Plain));
    format!(
        "# {number}. {title}\n\n\
         [All exhibits](README.md) · `cargo run -p museum {number}`\n\n\
         ```text\n{recipe}\n```\n\n\
         {happens}\n\
         ![Who is inside, step by step: the recipe, and the same schedule with lockkit]({slug}.svg)\n\n\
         ```text\n{broken}```\n\n\
         {remedy}\n\
         ## The same schedule with lockkit\n\n\
         {lockkit}\n\
         ```text\n{cured}```\n\n\
         The code: [{source}.rs](../../museum/src/exhibits/{source}.rs).\n\
         The guide: [{topic}]({address}).\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exhibits;

    #[test]
    fn every_exhibit_breaks_and_lockkit_does_not_and_the_pages_show_it() {
        let exhibits = exhibits::all();
        let show = |it: &Exhibit| it.shows().unwrap_or_else(|err| panic!("{}: {err:#}", it.slug));
        let shows: Vec<_> = exhibits.iter().map(show).collect();
        let folder = folder();
        for (file, text) in pages(&exhibits, &shows) {
            let written = fs::read_to_string(folder.join(&file)).unwrap_or_default();
            assert!(written == text, "docs/museum/{file} is out of date: `cargo run -p museum write`\n{text}");
        }
    }

    #[test]
    fn an_exhibit_fails_when_its_recipe_is_cured_or_its_cure_is_broken() {
        for exhibit in exhibits::all() {
            let cured = Exhibit { broken: exhibit.cured, ..exhibit.clone() }.shows().expect_err(exhibit.slug);
            assert_eq!(cured.to_string(), "the recipe does not break any more");
            let broken = Exhibit { cured: exhibit.broken, ..exhibit }.shows().expect_err(exhibit.slug);
            assert!(broken.to_string().starts_with("lockkit broke: "), "{broken}");
        }
    }
}
