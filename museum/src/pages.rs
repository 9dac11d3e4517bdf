//! The pages in `docs/museum`, made from the runs.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use crate::{
    comparison::comparison,
    exhibit::{Exhibit, Shows},
    picture::picture,
    text::{Style, timeline, wrapped},
    world::Servers,
};

const INTRODUCTION: [&str; 4] = [
    "Many recipes for locks are broken. Each page shows one: the recipe, a run in which it breaks, what its usual \
     remedy misses, and the same schedule with lockkit. You need not know Rust.",
    "A, B and C are processes, or customers whose requests run at the same time. A participant is *inside* from \
     taking a lock until it is done, and at most one may be inside. In the tables, `→` is followed by the result of \
     a step, `Err(…)` is an error, and `▲` names what broke. In the column of a participant, a word is what the step \
     did to it, `│` means that it is still inside, and `<waiting>` that its step has begun and cannot finish yet: the \
     step has a second row when it does. An empty cell is none of these. *lock* and *lease* show who has it, or \
     *free*.",
    "A schedule decides whose step is next and how much time passes, so every run is the same. The recipes run on a \
     small model of Redis and on SQLite. lockkit is the real library, with its leases in memory or in SQLite.",
    "`all` fails if a recipe no longer breaks, or if lockkit does. A test compares these pages with the runs. Other \
     tests run all exhibits on PostgreSQL, MySQL, MariaDB and Redis, as you can with `--url` and `--redis`. Where an \
     exhibit behaves otherwise on one of them, the program says so.",
];

/// Where the documents are.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// The names of the files in `docs` with their texts.
fn pages(exhibits: &[Exhibit], shows: &[Shows]) -> Result<Vec<(String, String)>> {
    let mut pages = vec![
        ("museum/README.md".to_owned(), index(exhibits, shows)),
        ("museum/comparison.md".to_owned(), comparison(&folder().join("benchmarks"))?),
    ];
    for (at, (exhibit, shows)) in exhibits.iter().zip(shows).enumerate() {
        pages.push((format!("museum/{}.md", exhibit.slug), page(at + 1, exhibit, shows)));
        pages.push((format!("museum/{}.svg", exhibit.slug), picture(shows)));
    }
    for file in fs::read_dir(folder().join("guide"))? {
        let path = file?.path();
        let name = path.file_name().context("a file has a name")?.to_string_lossy();
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        pages.push((format!("guide/{name}"), with_runs(&text, exhibits, shows)?));
    }
    Ok(pages)
}

/// A page of the guide, with the run of the recipe in the block after each `<!-- run: SLUG -->`.
fn with_runs(page: &str, exhibits: &[Exhibit], shows: &[Shows]) -> Result<String> {
    let mut text = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        text = text + line + "\n";
        let Some(slug) = line.strip_prefix("<!-- run: ").and_then(|it| it.strip_suffix(" -->")) else { continue };
        let at = exhibits.iter().position(|it| it.slug == slug).with_context(|| format!("no exhibit `{slug}`"))?;
        ensure!(lines.next() == Some("```text"), "after `{line}` comes a block of text");
        ensure!(lines.any(|it| it == "```"), "the block after `{line}` has no end");
        let _ = writeln!(text, "```text\n{}```", timeline(&shows[at].broken, Style::Plain));
    }
    Ok(text)
}

/// Writes all of them.
pub(crate) fn write(exhibits: &[Exhibit], shows: &[Shows]) -> Result<()> {
    let folder = folder();
    for (file, text) in pages(exhibits, shows)? {
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
         cargo run -p museum all --url postgres://root@localhost --redis redis://localhost/9\n\
         ```\n\n\
         | exhibit | what breaks |\n|---|---|\n"
    );
    for (at, (exhibit, shows)) in exhibits.iter().zip(shows).enumerate() {
        let Exhibit { slug, title, .. } = exhibit;
        let breach = shows.broken.breach().unwrap_or_default();
        let _ = writeln!(text, "| {}. [{title}]({slug}.md) | {breach} |", at + 1);
    }
    let further = "[recipes.md](recipes.md) lists 45 recipes with their faults, and the exhibit or test that \
                   shows each. [comparison.md](comparison.md) compares common locks with lockkit's: rates, and what \
                   each survives.";
    text + "\n" + &wrapped(further, 120)
}

fn page(number: usize, exhibit: &Exhibit, shows: &Shows) -> String {
    let Exhibit { slug, title, recipe, happens, remedy, lockkit, more: (topic, address), .. } = exhibit;
    let source = slug.split_once('-').map_or(*slug, |it| it.1).replace('-', "_");
    let elsewhere = exhibit.elsewhere(&Servers::default()).map_or_else(String::new, |it| format!(" ({})", it.text()));
    let (happens, lockkit) = (wrapped(&format!("{happens}{elsewhere}"), 120), wrapped(lockkit, 120));
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
        let show = |it: &Exhibit| it.shows(&Servers::default()).unwrap_or_else(|err| panic!("{}: {err:#}", it.slug));
        let shows: Vec<_> = exhibits.iter().map(show).collect();
        let folder = folder();
        for (file, text) in pages(&exhibits, &shows).expect("the pages") {
            let written = fs::read_to_string(folder.join(&file)).unwrap_or_default();
            assert!(written == text, "docs/{file} is out of date: `cargo run -p museum write`\n{text}");
        }
    }
}
