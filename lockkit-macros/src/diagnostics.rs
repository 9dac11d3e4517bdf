//! Compile errors: several of them as one, and what the user probably meant. Knows no attribute.

use proc_macro2::{Ident, TokenStream};

/// Several errors as one.
#[derive(Default)]
pub(crate) struct Errors(Option<syn::Error>);

impl Errors {
    pub(crate) fn push(&mut self, err: syn::Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(err),
            None => self.0 = Some(err),
        }
    }

    /// The value; an error is pushed.
    pub(crate) fn note<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        result.map_err(|err| self.push(err)).ok()
    }

    /// One `compile_error!` for each error.
    pub(crate) fn into_tokens(self) -> TokenStream {
        self.0.map(syn::Error::into_compile_error).unwrap_or_default()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

/// An error at a word.
pub(crate) fn error(at: &Ident, message: impl std::fmt::Display) -> syn::Error {
    syn::Error::new(at.span(), message)
}

/// The value of an argument, with the argument's name as written: errors point at it.
pub(crate) struct Given<T> {
    pub(crate) name: Ident,
    pub(crate) value: T,
}

/// Sets an argument; a second value is an error.
pub(crate) fn set<T>(slot: &mut Option<Given<T>>, name: Ident, value: T) -> syn::Result<()> {
    if slot.is_some() {
        return Err(error(&name, format!("`{name}` is given twice; remove one")));
    }
    *slot = Some(Given { name, value });
    Ok(())
}

/// A word that the user may write, and what other libraries call the same thing.
pub(crate) type Known = (&'static str, &'static [&'static str]);

/// The known word that was meant: by that name in any case, by another library's name, or misspelt.
pub(crate) fn meant(word: &str, known: &[Known]) -> Option<&'static str> {
    let word = word.to_lowercase();
    let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
    let other = known.iter().find(|(_, others)| others.contains(&word.as_str())).map(|(name, _)| *name);
    names.iter().find(|it| **it == word).copied().or(other).or_else(|| nearest(&word, &names))
}

/// "`a`, `b` or `c`".
pub(crate) fn list(words: &[&str], and: &str) -> String {
    let quoted: Vec<_> = words.iter().map(|it| format!("`{it}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} {and} {last}", others.join(", ")),
        None => String::new(),
    }
}

/// The known word that differs least, by at most two letters.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known.iter().map(|it| (distance(word, it), *it)).min()?;
    (near.0 <= 2 && near.0 < near.1.len()).then_some(near.1)
}

/// How many letters must be inserted, removed, replaced or swapped with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<_>, Vec<_>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_far_from_all_known_ones_means_none_of_them() {
        assert_eq!(nearest("x", &["on", "as"]), None);
        assert_eq!(nearest("colour", &["key", "keys"]), None);
    }
}
