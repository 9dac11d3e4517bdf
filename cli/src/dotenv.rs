//! The file `.env` of this folder, or of the nearest folder above it.

use std::{
    env::current_dir,
    fs::read_to_string,
    path::{Path, PathBuf},
};

use dotenvy::Error;

/// Sets the variables of the file that are not set yet. An error names the file, the line and what is wrong with it. It
/// shows no value, which may be a password. The variables above that line are set.
pub(crate) fn load() -> Result<(), String> {
    let path = path().unwrap_or_default();
    match dotenvy::from_path(&path) {
        Err(err) if !err.not_found() => Err(format!("{}: {}", path.display(), problem(&path, err))),
        _ => Ok(()),
    }
}

fn path() -> Option<PathBuf> {
    current_dir().ok()?.ancestors().map(|it| it.join(".env")).find(|it| it.is_file())
}

fn problem(path: &Path, err: Error) -> String {
    // The part that is wrong: all that follows a quote which is not closed, or else a line or its value.
    let (part, at) = match err {
        Error::LineParse(part, at) => (part, at),
        Error::Io(err) => return err.to_string(),
        _ => return "it cannot be read".to_owned(),
    };
    let text = read_to_string(path).unwrap_or_default();
    let line = match line_of(&text, &part) {
        Some(number) => format!("line {number}"),
        None => "a line".to_owned(),
    };
    if at == part.len() && text.ends_with(&part) && part.contains(['"', '\'']) {
        format!("{line} opens a quote that is not closed")
    } else {
        format!("{line} is not NAME=value, or its value needs quotes")
    }
}

/// The number of the line in which `part` begins. It ends at the end of a line, or at a comment.
fn line_of(text: &str, part: &str) -> Option<usize> {
    let found = text.match_indices(part).map(|it| it.0).find(|at| {
        let rest = text[at + part.len()..].trim_start_matches([' ', '\t', '\r']);
        let is_comment = text[..*at].rsplit('\n').next().is_some_and(|it| it.trim_start().starts_with('#'));
        !is_comment && (rest.is_empty() || rest.starts_with(['\n', '#']))
    })?;
    Some(text[..found].matches('\n').count() + 1)
}
