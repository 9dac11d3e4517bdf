//! The Rust snippets of README.md and of `docs/`, compiled as they stand there and, where they are tests, run.

#![allow(dead_code, unused_imports, unused_variables, missing_debug_implementations, clippy::all, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/readme.rs"));

/// What a registry shows has no files beside it, and a narrow column.
#[test]
fn the_readme_is_short_and_narrow_and_its_links_work_on_a_registry_page() {
    let text = include_str!("../../README.md");
    assert!(text.lines().count() <= 150, "{} lines", text.lines().count());
    let wide: Vec<_> = text.lines().filter(|it| it.chars().count() > 120).collect();
    assert_eq!(wide, [""; 0]);
    let links = text.split("](").skip(1).map(|it| it.split(')').next().unwrap_or_default());
    let relative: Vec<_> = links.filter(|it| !it.starts_with("https://")).collect();
    assert_eq!(relative, [""; 0]);
}

/// The links of the documents to files and headings of the repository lead somewhere.
#[test]
fn links_between_the_documents_lead_to_files_and_headings() {
    const REPOSITORY: &str = "https://github.com/lockkit/lockkit/blob/main/";
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let read = |page: &std::path::Path| std::fs::read_to_string(page).unwrap_or_default();
    let mut dead = Vec::new();
    let pages = [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "DESIGN.md",
        "TRAPS.md",
        "docs/from-sqlx-0.8.md",
        "docs/guide.md",
        "docs/operating.md",
        "docs/scale.md",
        "lockkit/migrations/README.md",
        "bench/README.md",
        "torture/README.md",
    ];
    for name in pages {
        let page = root.join(name);
        let text = read(&page);
        assert!(!text.is_empty(), "{name}");
        for link in text.split("](").skip(1).map(|it| it.split(')').next().unwrap_or_default()) {
            let (base, link) = match link.strip_prefix(REPOSITORY) {
                Some(path) => (root.to_path_buf(), path),
                None if link.starts_with("https://") => continue,
                None => (page.parent().expect("a folder").to_path_buf(), link),
            };
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { page.clone() } else { base.join(path) };
            let is_there =
                target.exists() && (heading.is_empty() || headings(&read(&target)).iter().any(|it| it == heading));
            if !is_there {
                dead.push(format!("{name}: {link}"));
            }
        }
    }
    assert_eq!(dead, [""; 0]);
}

/// The headings of a page as the last parts of links, in the way of GitHub.
fn headings(text: &str) -> Vec<String> {
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|it| it.is_alphanumeric() || " -_".contains(*it));
        kept.map(|it| if it == ' ' { '-' } else { it }).collect()
    };
    text.lines().filter(|it| it.starts_with('#')).map(anchor).collect()
}
