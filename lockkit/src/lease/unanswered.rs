//! The claims of a process that got no answer, and what its requests gave up, until the release is answered. Knows no
//! store.
//!
//! Such a claim may be in the store all the same. A server that waits for its replicas in COMMIT keeps the claim's row
//! locked for as long as that takes, which can be longer than the ttl, and its client is gone. A later claim is then
//! refused because of this one. So a refusal without a visible holder says nothing of other processes, until a claim of
//! this process is granted, or another holder is seen.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::{
    lease::queue::make_room,
    mutex::Mutex,
    value::{key::Key, token::Token},
};

/// For how long a claim counts.
const LASTS: Duration = Duration::from_mins(10);

/// How many of the last claims of a key are known by their tokens.
const MOST: usize = 16;

/// The unanswered claims, by key.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Mutex<HashMap<Key, Claims>>);

#[derive(Debug)]
struct Claims {
    last: Instant,
    tokens: Vec<Token>,
}

impl Claims {
    fn count(&self) -> bool {
        self.last.elapsed() < LASTS
    }
}

impl Unanswered {
    /// A claim got no answer, or has none yet though its caller may have given up.
    pub(super) fn note(&self, key: &Key, token: Token) {
        let mut claims = self.0.lock();
        if !claims.contains_key(key) {
            make_room(&mut claims, |_, it| it.count());
        }
        let last = Instant::now();
        let of_key = claims.entry(key.clone()).or_insert_with(|| Claims { last, tokens: Vec::new() });
        of_key.last = last;
        if of_key.tokens.contains(&token) {
            return;
        }
        if of_key.tokens.len() == MOST {
            of_key.tokens.remove(0);
        }
        of_key.tokens.push(token);
    }

    /// The claim was answered after all.
    pub(super) fn answered(&self, key: &Key, token: Token) {
        let mut claims = self.0.lock();
        if let Some(of_key) = claims.get_mut(key) {
            of_key.tokens.retain(|it| *it != token);
            if of_key.tokens.is_empty() {
                claims.remove(key);
            }
        }
    }

    /// No such claim of this key is in the store any more.
    pub(super) fn settled(&self, key: &Key) {
        self.0.lock().remove(key);
    }

    /// Whether a claim of one of these keys may be in the store.
    pub(super) fn are_of(&self, keys: &[Key]) -> bool {
        let claims = self.0.lock();
        keys.iter().any(|it| claims.get(it).is_some_and(Claims::count))
    }

    /// As [`are_of`](Self::are_of), of any key with this prefix and a name of its own without `/`.
    pub(super) fn are_below(&self, prefix: &str) -> bool {
        let is_below = |key: &Key| key.strip_prefix(prefix).is_some_and(|it| !it.contains('/'));
        self.0.lock().iter().any(|(key, it)| is_below(key) && it.count())
    }

    pub(super) fn has(&self, key: &Key, token: Token) -> bool {
        self.0.lock().get(key).is_some_and(|it| it.tokens.contains(&token))
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_claim_counts_until_it_is_settled_or_old() {
        let (unanswered, [a, b]) = (Unanswered::default(), ["a", "b"].map(Key::from));
        let tokens = [(); MOST + 1].map(|()| Token::random());
        for token in tokens {
            unanswered.note(&a, token);
        }
        let is_of = |key: &Key| unanswered.are_of(slice::from_ref(key));
        assert!(unanswered.are_of(&[b.clone(), a.clone()]) && !is_of(&b));
        unanswered.note(&Key::from("c/d/1"), tokens[0]);
        assert!(unanswered.are_below("c/d/") && !unanswered.are_below("c/"));
        assert!(!unanswered.has(&a, tokens[0]) && unanswered.has(&a, tokens[1]) && !unanswered.has(&b, tokens[1]));
        unanswered.note(&b, tokens[0]);
        unanswered.note(&b, tokens[1]);
        unanswered.answered(&b, tokens[0]);
        assert!(is_of(&b));
        unanswered.answered(&b, tokens[1]);
        assert!(!is_of(&b));
        unanswered.note(&b, tokens[0]);
        unanswered.settled(&b);
        assert!(!is_of(&b));
        tokio::time::advance(LASTS).await;
        assert!(!is_of(&a));
    }
}
