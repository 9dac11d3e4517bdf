//! The keys of a lock: templates, which are checked here, and expressions.

use syn::{Expr, ExprArray, Lit};

use crate::{
    diagnostics::{Given, error},
    with_lock::{
        plan::{Key, Keys},
        strategy::Strategy,
        template::Template,
        validate::{
            Checker,
            literal::{literal, ungrouped},
        },
    },
};

impl Checker<'_> {
    /// The keys of a lease.
    pub(super) fn keys(&mut self, key: Option<Given<Expr>>, keys: Option<Given<Expr>>) -> Option<Keys> {
        let Some(Given { name, value }) = keys else {
            let is_broken = key.is_none() && self.is_broken("keys");
            return if is_broken { None } else { self.one_key(key, None).map(Keys::One) };
        };
        if key.is_some() {
            self.errors.push(error(&name, "`key` and `keys` are both given; keep one of them"));
            return None;
        }
        match ungrouped(&value) {
            Expr::Array(ExprArray { elems, .. }) if elems.is_empty() => {
                let message = "`keys` names no lock; write `keys = [\"account:{from}\", \"account:{to}\"]`";
                self.errors.push(error(&name, message));
                None
            }
            Expr::Array(ExprArray { elems, .. }) => {
                let keys: Vec<_> = elems.iter().map(|it| self.key(it.clone())).collect();
                keys.into_iter().collect::<Option<_>>().map(Keys::Each)
            }
            Expr::Lit(_) => {
                self.errors.push(error(&name, "`keys` is for several; write `key = …` for one, or `keys = […, …]`"));
                None
            }
            _ => Some(Keys::Expr(value)),
        }
    }

    /// The key of a lock that has no `keys`.
    pub(super) fn one_key(&mut self, key: Option<Given<Expr>>, keys: Option<&Given<Expr>>) -> Option<Key> {
        if key.is_none() && keys.is_some() {
            return None;
        }
        if let Some(Given { name, value }) = &key
            && matches!(ungrouped(value), Expr::Array(_))
        {
            let instead = if self.strategy == Strategy::Lease {
                "write `keys = […]` for several"
            } else {
                "write `key = \"…\"`"
            };
            self.errors.push(error(name, format!("`key` is the name of one lock; {instead}")));
            return None;
        }
        let key = self.required(key, r#"key = "order:{user_id}""#, "the name of the lock")?;
        self.key(key)
    }

    fn key(&mut self, key: Expr) -> Option<Key> {
        let literal = match literal(&key) {
            None => return Some(Key::Expr(key)),
            Some(Lit::Str(literal)) => literal,
            Some(other) => {
                self.fail(other.span(), r#"a key is text: write `"order:{user_id}"`, or give a `String` or `Key`"#);
                return None;
            }
        };
        match Template::parse(&literal.value()) {
            Ok(template) => Some(Key::Template(template, literal.span())),
            Err(message) => {
                self.fail(literal.span(), message);
                None
            }
        }
    }
}
