//! An answer as it is stored: JSON, after a mark if it is an error.

use std::{any::type_name, fmt};

use serde::{Serialize, de::DeserializeOwned};

use crate::value::{
    error::{BoxError, Error, Result},
    key::Key,
};

/// Stands before an error. No JSON begins with it.
const ERR: u8 = b'!';

/// How a value is written and read.
#[derive(Debug)]
pub struct Form<T> {
    write: fn(&T) -> serde_json::Result<Vec<u8>>,
    read: fn(&[u8]) -> serde_json::Result<T>,
}

impl<T: Serialize + DeserializeOwned> Form<T> {
    pub(crate) fn json() -> Self {
        Self { write: serde_json::to_vec, read: |text| serde_json::from_slice(text) }
    }
}

impl<T> Form<T> {
    fn written(&self, value: &T, key: &Key, most: usize) -> Result<Vec<u8>> {
        let failed = |source: BoxError| refused::<T>(key, "cannot be stored", source);
        let text = (self.write)(value).map_err(|err| failed(err.into()))?;
        if text.len() > most {
            return Err(failed(TooLarge { bytes: text.len(), most }.into()));
        }
        if let Err(err) = (self.read)(&text) {
            return Err(failed(err.into()));
        }
        Ok(text)
    }

    fn parsed(&self, text: &[u8], key: &Key) -> Result<T> {
        (self.read)(text).map_err(|err| refused::<T>(key, UNREADABLE, err.into()))
    }
}

/// How a result is written and read: a value, and the errors that are answers, too.
#[derive(Debug)]
pub struct Forms<T, E> {
    value: Form<T>,
    errs: Option<Errs<E>>,
}

/// Which errors are answers, and how they are written and read.
pub struct Errs<E> {
    are_answers: Box<dyn Fn(&E) -> bool + Send + Sync>,
    form: Form<E>,
}

impl<E: Serialize + DeserializeOwned> Errs<E> {
    pub(crate) fn json(are_answers: impl Fn(&E) -> bool + Send + Sync + 'static) -> Self {
        Self { are_answers: Box::new(are_answers), form: Form::json() }
    }
}

impl<E> fmt::Debug for Errs<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Errs").finish_non_exhaustive()
    }
}

impl<T, E> Forms<T, E> {
    /// Errors are not stored.
    pub(crate) fn of_values(value: Form<T>) -> Self {
        Self { value, errs: None }
    }

    pub(crate) fn with_errs(value: Form<T>, errs: Errs<E>) -> Self {
        Self { value, errs: Some(errs) }
    }

    /// Whether errors can be answers.
    pub(super) fn have_errs(&self) -> bool {
        self.errs.is_some()
    }

    /// The text to store, which can be read again. `None` for an error that is no answer.
    pub(super) fn written(&self, done: &Result<T, E>, key: &Key, most: usize) -> Option<Result<Vec<u8>>> {
        match done {
            Ok(value) => Some(self.value.written(value, key, most)),
            Err(err) => {
                let errs = self.errs.as_ref().filter(|errs| (errs.are_answers)(err))?;
                Some(errs.form.written(err, key, most).map(|text| [&[ERR], &*text].concat()))
            }
        }
    }
}

/// An answer as it is stored.
#[derive(Debug)]
pub struct Stored {
    pub(super) key: Key,
    pub(super) text: Vec<u8>,
}

impl Stored {
    pub(crate) fn read<T, E>(self, forms: &Forms<T, E>) -> Result<Result<T, E>> {
        let Self { key, text } = self;
        match (text.split_first(), &forms.errs) {
            (Some((&ERR, text)), Some(errs)) => errs.form.parsed(text, &key).map(Err),
            (Some((&ERR, _)), None) => Err(refused::<T>(&key, UNREADABLE, Box::new(IsError))),
            _ => forms.value.parsed(&text, &key).map(Ok),
        }
    }
}

const UNREADABLE: &str = "was stored and cannot be read";

fn refused<T>(key: &Key, problem: &'static str, source: BoxError) -> Error {
    Error::Answer { key: key.clone(), problem, what: type_name::<T>(), source }
}

/// A stored text is an answer that is the same when it is stored again, or it is refused. Panics otherwise.
#[cfg(any(test, feature = "_fuzz"))]
pub fn check_answer(text: &[u8]) {
    type Answer = (Option<i64>, Vec<f64>, serde_json::Value);
    type Refusal = (u16, String);
    let key = Key::from("k");
    let stored = |text: &[u8]| Stored { key: key.clone(), text: text.to_vec() };
    let forms = Forms::<Answer, Refusal>::with_errs(Form::json(), Errs::json(|_| true));
    if let Ok(answer) = stored(text).read(&forms) {
        let written = forms.written(&answer, &key, usize::MAX).expect("errors are answers").expect("it was read");
        assert_eq!(stored(&written).read(&forms).expect("it was written"), answer);
    }
    let forms = Forms::<Answer, Refusal>::of_values(Form::json());
    let is_value = matches!(stored(text).read(&forms), Ok(Ok(_)));
    assert!(!is_value || text.first() != Some(&ERR), "an error was read as a value");
}

/// Why an answer is not stored.
#[derive(Debug, thiserror::Error)]
#[error("it has {bytes} bytes, and `max_answer` allows {most}")]
struct TooLarge {
    bytes: usize,
    most: usize,
}

/// Why an answer cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("it is an error, which only a request with `store_err` can read")]
struct IsError;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_is_an_answer_or_is_refused(
            number in "null|-?[0-9]{1,20}",
            float in "(-?[0-9]{1,20}(\\.[0-9]{1,20})?(e-?[0-9]{1,3})?)?",
            value in "\\{\"a\":\"[a-z\\\\\"]{0,9}\"\\}|[0-9]{0,22}|true",
            text in "\\PC*",
        ) {
            let answer = format!("[{number},[{float}],{value}]");
            for text in [&*answer, &*format!("!{answer}"), &*format!("![{value},\"{number}\"]"), &*text] {
                check_answer(text.as_bytes());
            }
        }
    }
}
