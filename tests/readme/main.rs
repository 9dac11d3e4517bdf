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
    for page in pages(root) {
        let name = page.strip_prefix(root).expect("a page of the repository").display().to_string();
        let text = read(&page);
        for link in links(&text) {
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

/// The links of the documents and of the macros' documentation to items of lockkit lead to items that are public. Those
/// in the documentation of other crates are rustdoc's to check.
#[test]
fn links_to_the_reference_lead_to_public_items() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let api = include_str!("../source/api/api.txt");
    let names = api.lines().filter_map(|it| it.split(": ").next());
    // Macros end with `!` there.
    let public: std::collections::HashSet<_> = names.map(|it| it.trim_end_matches('!')).collect();
    let macros = root.join("lockkit-macros/src");
    let sources = ["lib.rs", "with_lock/arguments/table.md"].map(|it| macros.join(it));
    let (mut dead, mut seen) = (Vec::new(), 0);
    for page in pages(root).into_iter().chain(sources) {
        let text = std::fs::read_to_string(&page).expect("read the page");
        for link in links(&text) {
            let reference = ["https://docs.rs/lockkit/latest/lockkit/", "../lockkit/"];
            let Some(item) = reference.iter().find_map(|it| link.strip_prefix(it)).filter(|it| it.contains(".html"))
            else {
                continue;
            };
            seen += 1;
            if !public.contains(&*path_of(item)) {
                dead.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(seen > 2, "only {seen} links");
    assert_eq!(dead, [""; 0]);
    assert_eq!(path_of("lease/struct.LeasesBuilder.html#method.ttl"), "lockkit::lease::LeasesBuilder::ttl");
    assert_eq!(path_of("fn.migrate.html"), "lockkit::migrate");
}

/// The item that a page of rustdoc describes, as its users write it.
fn path_of(page: &str) -> String {
    let (page, anchor) = page.split_once('#').unwrap_or((page, ""));
    let parts = page.trim_end_matches(".html").split('/').map(|it| it.split_once('.').map_or(it, |(_, name)| name));
    let member = anchor.split_once('.').map(|(_, name)| name);
    std::iter::once("lockkit").chain(parts).chain(member).collect::<Vec<_>>().join("::")
}

/// The targets of the links in a text.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let inline = text.split("](").skip(1).filter_map(|it| it.split(')').next());
    // `[results]: https://…`, in rustdoc as well.
    let named = text.lines().filter_map(|line| {
        let (name, target) =
            line.trim_start_matches("//").trim_start_matches(['/', '!']).trim_start().split_once("]: ")?;
        name.starts_with('[').then_some(target.trim())
    });
    inline.chain(named)
}

/// The pages of the repository.
fn pages(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut pages = Vec::new();
    for entry in std::fs::read_dir(folder).expect("read a folder") {
        let path = entry.expect("read a folder").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_symlink() || name.starts_with('.') || name == "target" {
            continue;
        }
        if path.is_dir() {
            pages.extend(self::pages(&path));
        } else if name.ends_with(".md") {
            pages.push(path);
        }
    }
    pages
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
