//! The files of the repository, and the application of a rule to them.

use std::fs;
use std::path::{Path, PathBuf};

/// The path of a file or folder of the repository.
pub(crate) fn path(within: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in a folder of the repository");
    root.join(within)
}

/// The text of one file of the repository.
pub(crate) fn text(file: &str) -> String {
    fs::read_to_string(path(file)).unwrap_or_else(|err| panic!("read {file}: {err}"))
}

/// The files below a folder of the repository whose names have this ending, with their paths from that folder.
pub(crate) fn files(folder: &str, ending: &str) -> Vec<(String, String)> {
    let root = path(folder);
    let (mut found, mut folders) = (Vec::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("read a folder") {
            let entry = entry.expect("read a folder");
            let (path, kind) = (entry.path(), entry.file_type().expect("the type of a file"));
            let name = entry.file_name().into_string().expect("a name in UTF-8");
            let is_hidden = name.starts_with('.') && ![".ci", ".github", ".gitignore"].contains(&name.as_str());
            if kind.is_dir() && !is_hidden && !["target", "corpus", "artifacts"].contains(&name.as_str()) {
                folders.push(path);
            } else if kind.is_file() && !is_hidden && name.ends_with(ending) {
                // A file that is not text breaks no rule.
                let Ok(text) = fs::read_to_string(&path) else { continue };
                let path = path.strip_prefix(&root).expect("a file in the folder").display().to_string();
                found.push((path, text));
            }
        }
    }
    assert!(!found.is_empty(), "no *{ending} in {folder}");
    found.sort();
    found
}

/// Applies a rule to files.
///
/// # Panics
/// If the rule has a complaint, with all complaints.
pub(crate) fn check(files: &[(String, String)], rule: fn(&str, &str) -> Vec<String>) {
    let complaints: Vec<_> = files.iter().flat_map(|(path, text)| rule(path, text)).collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}
