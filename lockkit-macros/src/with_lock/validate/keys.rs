//! The keys of a lock: templates, which are checked here, and expressions.

use syn::{Expr, ExprArray, ExprCall, ExprLit, ExprMethodCall, Lit, LitStr, Token, punctuated::Punctuated};

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
            _ => self.no_template(&value).then_some(Keys::Expr(value)),
        }
    }

    /// Refuses texts with captures that are no templates: their braces would be in every key.
    fn no_template(&mut self, key: &Expr) -> bool {
        let texts = plain_texts(key);
        let captures = texts.iter().find(|it| Template::parse(&it.value()).is_ok_and(|it| it.constant().is_none()));
        if let Some(text) = captures {
            let message = format!(
                "only a text that stands alone captures; here the braces would be in the key, the same one for all: \
                 write `{:?}` alone, or `lockkit::key!({0:?})`",
                text.value()
            );
            self.fail(text.span(), message);
        }
        captures.is_none()
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
            None => return self.no_template(&key).then_some(Key::Expr(key)),
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

/// The texts that become keys as they are: `"…".to_owned()`, `String::from("…")`, the elements of an array or
/// `vec![…]`.
fn plain_texts(expr: &Expr) -> Vec<LitStr> {
    match ungrouped(expr) {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => vec![text.clone()],
        Expr::Paren(it) => plain_texts(&it.expr),
        Expr::Reference(it) => plain_texts(&it.expr),
        Expr::Try(it) => plain_texts(&it.expr),
        Expr::Array(it) => it.elems.iter().flat_map(plain_texts).collect(),
        Expr::MethodCall(ExprMethodCall { receiver, .. }) => plain_texts(receiver),
        Expr::Call(ExprCall { args, .. }) if args.len() == 1 => args.iter().flat_map(plain_texts).collect(),
        Expr::Macro(it) if it.mac.path.is_ident("vec") => {
            let elements = it.mac.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated);
            elements.iter().flatten().flat_map(plain_texts).collect()
        }
        _ => Vec::new(),
    }
}
