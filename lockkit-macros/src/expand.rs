//! What the function becomes: calls to `lockkit::__private`, around the user's body.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{
    Expr, GenericArgument, LitStr, PathArguments, PathSegment, ReturnType, Signature, Type, TypePath, ext::IdentExt,
    spanned::Spanned,
};

use crate::{
    args::{Args, Errors, Typed},
    body::Body,
    columns::By,
    function::Function,
    plan::{Key, Keys, Lease, Lock, Named, Plan, Retry, Row, Section, Session, Terms, Version},
    rewritten::{Boxed, map, rename_self},
    template::Piece,
};

/// The whole attribute. After an error of its own the function is still there, unchanged. The error stands beside it: rustc
/// then does not report the names that the body would have had from the attribute.
pub(crate) fn with_lock(args: TokenStream, item: &TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    match checked(args, item, &mut errors) {
        Some(expanded) if errors.is_empty() => expanded,
        _ => {
            let errors = errors.into_tokens();
            quote!(#errors #item)
        }
    }
}

fn checked(args: TokenStream, item: &TokenStream, errors: &mut Errors) -> Option<TokenStream> {
    let function = errors.note(syn::parse2::<Function>(item.clone()));
    let boxed = match &function {
        Some(function) => {
            function.check(errors);
            let boxed = if function.sig.asyncness.is_none() { Boxed::parse(&function.body) } else { None };
            if function.sig.asyncness.is_none() && function.sig.constness.is_none() && boxed.is_none() {
                let message = if contains(function.body.clone(), "block_on") {
                    "`#[with_lock]` waits for the lock, so it needs an `async fn`; an attribute above it, such as `#[tokio::main]` \
                     or `#[tokio::test]`, has made this one a plain `fn`: put `#[with_lock]` on a function that this one calls"
                } else {
                    "`#[with_lock]` waits for the lock, so it needs an `async fn`"
                };
                errors.push(syn::Error::new(function.sig.fn_token.span, message));
            }
            boxed
        }
        None => None,
    };
    let args = if boxed.as_ref().is_some_and(|it| it.self_renamed) { rename_self(args) } else { args };
    let args = Args::parse(args, errors);
    let plan = Plan::new(args, errors);
    let Function { attrs, vis, sig, brace, inner_attrs, body } = &function?;
    let plan = plan?;
    let expanded = match boxed {
        None => {
            let returns = match &sig.output {
                ReturnType::Type(_, returns) => Some((**returns).clone()),
                ReturnType::Default => None,
            };
            Expander::new(&plan.krate, sig, returns, body.clone(), brace.span.join()).expand(&plan.lock)
        }
        Some(Boxed { pin, head, returns, body, .. }) => {
            let expanded = Expander::new(&plan.krate, sig, returns, body, brace.span.join()).expand(&plan.lock);
            quote!(#pin(async move { #head #expanded }))
        }
    };
    let mut tokens = quote!(#(#attrs)* #vis #sig);
    brace.surround(&mut tokens, |tokens| tokens.extend(quote!(#(#inner_attrs)* #expanded)));
    Some(tokens)
}

/// Whether the word occurs, inside of groups too.
fn contains(tokens: TokenStream, word: &str) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Group(group) => contains(group.stream(), word),
        TokenTree::Ident(ident) => ident == word,
        _ => false,
    })
}

/// Where the error's type is written; the whole type, where it is not to be seen.
fn span_of_error(returns: &Type) -> Span {
    if let Type::Path(TypePath { path, .. }) = returns
        && let Some(PathSegment { arguments: PathArguments::AngleBracketed(arguments), .. }) = path.segments.last()
        && let (2, Some(GenericArgument::Type(err))) = (arguments.args.len(), arguments.args.last())
    {
        return err.span();
    }
    returns.span()
}

/// The path, every token of it at the span, or rustc blames the whole attribute.
fn at(path: &TokenStream, span: Span) -> TokenStream {
    let is_dollar_crate = |it: TokenTree| matches!(it, TokenTree::Ident(it) if it == "$crate");
    if path.clone().into_iter().any(is_dollar_crate) {
        return path.clone();
    }
    map(path.clone(), &|mut token| {
        token.set_span(span);
        token
    })
}

/// Calls whose tokens and expressions are all at `on`: what rustc finds missing in one place, it reports once.
struct Reached {
    first: Span,
    last: Span,
    path: TokenStream,
}

impl Reached {
    fn new(on: &Expr, private: &TokenStream) -> Self {
        let mixed = Span::mixed_site();
        let mut tokens = on.to_token_stream().into_iter().map(|it| it.span().resolved_at(mixed));
        let first = tokens.next().unwrap_or(mixed);
        let last = tokens.last().unwrap_or(first);
        Self { first, last, path: at(private, first) }
    }

    fn call(&self, function: &str, arguments: TokenStream) -> TokenStream {
        let Self { last, path, .. } = self;
        let function = Ident::new(function, *last);
        let mut arguments = Group::new(Delimiter::Parenthesis, arguments);
        arguments.set_span(*last);
        quote!(#path::#function #arguments)
    }
}

/// Expands one function. Names of its own are at `mixed_site`: the body does not see them, nor they the body's.
///
/// Bodies are pinned where they are and lent to lockkit: every function that took one by value would double the size of
/// the future. They are pinned in a block of their own, so that they end before the lock does.
struct Expander {
    /// `::lockkit::__private`
    private: TokenStream,
    /// The same, at the return type: for what fails to compile when that cannot carry an error of lockkit.
    blamed: TokenStream,
    blame: Span,
    body: Body,
}

impl Expander {
    fn new(krate: &TokenStream, sig: &Signature, returns: Option<Type>, body: TokenStream, brace: Span) -> Self {
        let mixed = Span::mixed_site();
        let blame = returns.as_ref().map_or_else(|| sig.ident.span(), span_of_error).resolved_at(mixed);
        let private = quote_spanned!(mixed=> #krate::__private);
        let blamed = at(&private, blame);
        let body = Body::new(sig, returns, body, brace);
        Self { private, blamed, blame, body }
    }

    fn expand(&self, lock: &Lock) -> TokenStream {
        match lock {
            Lock::Lease(lease) => self.lease(lease),
            Lock::Row(row) => self.row(row),
            Lock::Named(Named { key, section }) => self.named(key, section),
            Lock::Session(session) => self.session(session),
            Lock::Version(version) => self.version(version),
        }
    }

    fn lease(&self, lease: &Lease) -> TokenStream {
        let Lease { on, keys, terms, wait, on_busy, bind, tx } = lease;
        let Terms { ttl, min_hold, on_lost, is_fair } = terms;
        let private = &self.private;
        let mixed = Span::mixed_site();
        let (keys, request, acquire) = match keys {
            Keys::One(key) => (self.key(key), "lease", "acquire"),
            Keys::Each(keys) => {
                let keys = keys.iter().map(|it| self.key(it));
                (quote_spanned!(mixed=> [#(#keys),*]), "leases_of_all", "acquire_all")
            }
            Keys::Expr(keys) => (quote_spanned!(mixed=> #private::keys(#keys)), "leases_of_all", "acquire_all"),
        };
        let ttl = ttl.as_ref().map(|it| quote_spanned!(mixed=> .ttl(#it)));
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> .wait(#it)));
        let min_hold = min_hold.as_ref().map(|it| quote_spanned!(mixed=> .min_hold(#it)));
        let on_lost = on_lost.as_ref().map(|it| quote_spanned!(mixed=> .on_lost(#private::OnLost::#it)));
        let fair = is_fair.then(|| quote_spanned!(mixed=> .fair()));
        let failed = self.return_failure(on_busy.as_ref());
        let at_on = Reached::new(on, private);
        let leases = at_on.call("leases", on.to_token_stream());
        let leases = if tx.is_some() { at_on.call("leases_with_tx", leases) } else { at_on.call("own_leases", leases) };
        let request = at_on.call(request, quote_spanned!(mixed=> &leases, keys));
        let asked = at_on.call(acquire, quote_spanned!(at_on.first=> request));
        let acquire = quote_spanned! {mixed=>
            let leases = #leases;
            let keys = #keys;
            let request = #request #ttl #wait #min_hold #on_lost #fair;
            let held = match #asked.await {
                ::core::result::Result::Ok(held) => held,
                #failed
            };
        };
        match tx {
            None => self.held(&acquire, bind.as_ref()),
            Some(tx) => self.held_with_tx(&acquire, bind.as_ref(), tx),
        }
    }

    fn session(&self, session: &Session) -> TokenStream {
        let Session { on, key, wait, on_busy, bind } = session;
        let private = &self.private;
        let pool = self.pool("session_pool", on);
        let mixed = Span::mixed_site();
        let key = self.key(key);
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> .wait(#it)));
        let failed = self.return_failure(on_busy.as_ref());
        let acquire = quote_spanned! {mixed=>
            let pool = #pool;
            let key = #key;
            let lock = #private::SessionLock::new(key)#wait;
            let held = match lock.acquire(&pool).await {
                ::core::result::Result::Ok(held) => held,
                #failed
            };
        };
        self.held(&acquire, bind.as_ref())
    }

    /// The body under what `acquire` holds.
    fn held(&self, acquire: &TokenStream, bind: Option<&Ident>) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let bind = bind.map(|it| quote_spanned!(mixed=> let #it = #private::lend(&held);));
        let body = self.body.owning();
        let guarded = quote_spanned!(*blame=> #blamed::guarded(&held, body).await);
        let finish = quote_spanned!(*blame=> #blamed::end_held(held, result).await);
        quote_spanned! {mixed=>
            #acquire
            #bind
            let result = {
                let body = ::core::pin::pin!(#body);
                #guarded
            };
            #finish
        }
    }

    /// The same in a transaction, which is committed only if it is held until then.
    fn held_with_tx(&self, acquire: &TokenStream, bind: Option<&Ident>, tx: &Ident) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let body = self.body.lending(&[Some(tx), bind]);
        let bind = bind.map(|it| quote_spanned!(mixed=> let #it = #private::lend(&held);));
        let guarded = quote_spanned!(*blame=> #blamed::guarded(&held, body).await);
        let finish = quote_spanned!(*blame=> #blamed::end_held_tx(held, #tx, result).await);
        let failed = self.return_failure(None);
        quote_spanned! {mixed=>
            #acquire
            #[allow(unused_mut, unused_variables)]
            let mut #tx = match #private::lease_tx(&leases).await {
                ::core::result::Result::Ok(tx) => tx,
                #failed
            };
            #bind
            let result = {
                let body = ::core::pin::pin!(#body);
                #guarded
            };
            #finish
        }
    }

    /// The pool, checked by one of lockkit's functions.
    fn pool(&self, check: &str, on: &Expr) -> TokenStream {
        let at_on = Reached::new(on, &self.private);
        at_on.call(check, at_on.call("pool", on.to_token_stream()))
    }

    fn row(&self, row: &Row) -> TokenStream {
        let Row { table, by, by_any, order_by, limit, skips_locked, section } = row;
        let private = &self.private;
        let mixed = Span::mixed_site();
        let name = |column: &Ident| LitStr::new(&column.unraw().to_string(), column.span());
        let cloned =
            |value: &Expr| quote_spanned!(value.span().resolved_at(mixed)=> ::core::clone::Clone::clone(&(#value)));
        let values = by.iter().map(|it| ("by", it)).chain(by_any.iter().map(|it| ("by_any", it)));
        let lock = values.fold(quote_spanned!(mixed=> #private::row_lock(&pool, #table)), |lock, (by, it)| {
            let By { column, value } = it;
            let (by, column, value) = (Ident::new(by, mixed), name(column), cloned(value));
            quote_spanned!(mixed=> #private::#by(#lock, #column, #value))
        });
        let order_by = order_by.iter().map(|column| {
            let column = name(column);
            quote_spanned!(mixed=> .order_by(#column))
        });
        let limit = limit.as_ref().map(|it| quote_spanned!(mixed=> .limit(#it)));
        let skip_locked = skips_locked.then(|| quote_spanned!(mixed=> .skip_locked()));
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(wait)));
        let lock = quote_spanned!(mixed=> #lock #(#order_by)* #limit #skip_locked #wait);
        let begin = |deadline: TokenStream| {
            let Some(Typed { ty, .. }) = &section.rows else {
                return quote_spanned!(mixed=> #private::row_tx(&pool, #deadline, lock).await);
            };
            // At the type: what is wrong with it, rustc reports there.
            let span = ty.span().resolved_at(mixed);
            let private = at(private, span);
            quote_spanned!(span=> #private::row_tx_with_rows::<#ty, _>(&pool, #deadline, lock).await)
        };
        self.section(
            section,
            &quote_spanned!(mixed=> let key = #private::key(#table);),
            ["row_pool", "under_rows"],
            &lock,
            &begin,
        )
    }

    fn named(&self, key: &Key, section: &Section) -> TokenStream {
        let private = &self.private;
        let mixed = Span::mixed_site();
        let key = self.key(key);
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(wait)));
        let lock = quote_spanned!(mixed=> #private::NamedLock::new(&key)#wait);
        let before = quote_spanned!(mixed=> let key = #key;);
        self.section(
            section,
            &before,
            ["named_pool", "under_name"],
            &lock,
            &|deadline| quote_spanned!(mixed=> #private::named_tx(&pool, #deadline, lock).await),
        )
    }

    /// One transaction under a lock: once, or as often as the retry says.
    fn section(
        &self,
        section: &Section,
        before: &TokenStream,
        [pool, under]: [&str; 2],
        lock: &TokenStream,
        begin: &dyn Fn(TokenStream) -> TokenStream,
    ) -> TokenStream {
        let Section { on, wait, on_busy, tx, rows, retry } = section;
        let private = &self.private;
        let mixed = Span::mixed_site();
        let pool = self.pool(pool, on);
        let under = Ident::new(under, mixed);
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> let wait = #private::wait(#it);));
        let before = quote_spanned! {mixed=>
            let pool = #pool;
            #before
            #wait
        };
        // The transaction, with the rows where the body is to have them.
        let rows = rows.as_ref().map(|it| &it.name);
        let bound =
            rows.map_or_else(|| quote_spanned!(mixed=> mut #tx), |rows| quote_spanned!(mixed=> (mut #tx, #rows)));
        if let Some(retry) = retry {
            let begin = begin(quote_spanned!(mixed=> deadline));
            let begin = quote_spanned! {mixed=>
                let lock = #lock;
                let begun = #begin;
            };
            let under = quote_spanned!(mixed=> #private::#under(&pool, &key, body));
            return self.retried(retry, &before, Some((tx, bound, begin, under)), on_busy.as_ref());
        }
        let failed = self.return_failure(on_busy.as_ref());
        let begin = begin(quote_spanned!(mixed=> ::core::option::Option::None));
        let body = self.body.lending(&[Some(tx), rows]);
        let finish = self.end_tx(tx);
        quote_spanned! {mixed=>
            #before
            let lock = #lock;
            #[allow(unused_mut, unused_variables)]
            let #bound = match #begin {
                ::core::result::Result::Ok(begun) => begun,
                #failed
            };
            let result = {
                let body = ::core::pin::pin!(#body);
                #private::#under(&pool, &key, body).await
            };
            #finish
        }
    }

    fn version(&self, version: &Version) -> TokenStream {
        let Version { tx, retry } = version;
        let private = &self.private;
        let mixed = Span::mixed_site();
        match tx {
            None => self.retried(retry, &TokenStream::new(), None, None),
            Some((on, tx)) => {
                let pool = self.pool("known_pool", on);
                let before = quote_spanned!(mixed=> let pool = #pool;);
                let begin = quote_spanned!(mixed=> let begun = #private::plain_tx(&pool, deadline).await;);
                let bound = quote_spanned!(mixed=> mut #tx);
                self.retried(retry, &before, Some((tx, bound, begin, quote_spanned!(mixed=> body))), None)
            }
        }
    }

    /// The loop. The commit is outside of the deadline: a deadline that cut it off would leave its outcome unknown.
    fn retried(
        &self,
        retry: &Retry,
        before: &TokenStream,
        tx: Option<(&Ident, TokenStream, TokenStream, TokenStream)>,
        on_busy: Option<&Expr>,
    ) -> TokenStream {
        let Retry { attempts, deadline, test, bind } = retry;
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let failed = self.return_failure(None);
        let none = || quote_spanned!(mixed=> ::core::option::Option::None);
        let some = |it: TokenStream| quote_spanned!(mixed=> ::core::option::Option::Some(#it));
        let attempts = attempts.as_ref().map_or_else(none, |it| some(it.to_token_stream()));
        let deadline = deadline.clone().map_or_else(none, some);
        let bind = bind.as_ref().map(|it| quote_spanned!(mixed=> let #it: u32 = attempt;));
        let body = self.body.rerun(bind.as_ref());
        let attempt = match tx {
            None => quote_spanned! {mixed=>
                let ended = {
                    let body = ::core::pin::pin!(#body);
                    #private::until(deadline, body).await
                };
            },
            Some((tx, bound, begin, under)) => {
                let finish = self.end_tx(tx);
                let busy = on_busy.map(|it| {
                    quote_spanned! {mixed=>
                        ::core::option::Option::Some(::core::result::Result::Err(err))
                            if #private::Error::is_contended(&err) => return #it,
                    }
                });
                let lock_failed = quote_spanned!(*blame=> #blamed::Outcome::lock_failed(err));
                quote_spanned! {mixed=>
                    let tried = {
                        let body = ::core::pin::pin!(async {
                            #begin
                            match begun {
                                #[allow(unused_mut, unused_variables)]
                                ::core::result::Result::Ok(#bound) => {
                                    let result = {
                                        let body = ::core::pin::pin!(#body);
                                        #under.await
                                    };
                                    ::core::result::Result::Ok((#tx, result))
                                }
                                ::core::result::Result::Err(err) => ::core::result::Result::Err(err),
                            }
                        });
                        #private::until(deadline, body).await
                    };
                    let ended = match tried {
                        ::core::option::Option::Some(::core::result::Result::Ok((#tx, result))) => {
                            ::core::option::Option::Some(#finish)
                        }
                        #busy
                        ::core::option::Option::Some(::core::result::Result::Err(err)) => {
                            ::core::option::Option::Some(#lock_failed)
                        }
                        ::core::option::Option::None => ::core::option::Option::None,
                    };
                }
            }
        };
        let step = match test {
            None => quote_spanned!(*blame=> #blamed::step(&mut retry, ended).await),
            Some(test) => quote_spanned!(*blame=> #blamed::step_if(&mut retry, ended, #test).await),
        };
        quote_spanned! {mixed=>
            #before
            let mut retry = match #private::Retry::new(#private::policy(#attempts, #deadline)) {
                ::core::result::Result::Ok(retry) => retry,
                #failed
            };
            loop {
                #[allow(unused_variables)]
                let attempt = retry.start();
                let deadline = retry.deadline();
                #attempt
                if let ::core::option::Option::Some(result) = #step {
                    break result;
                }
            }
        }
    }

    fn end_tx(&self, tx: &Ident) -> TokenStream {
        let Self { blamed, blame, .. } = self;
        quote_spanned!(*blame=> #blamed::end_tx(#tx, result).await)
    }

    /// The arms of a `match` that leave the function.
    fn return_failure(&self, on_busy: Option<&Expr>) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let busy = on_busy.map(|it| {
            quote_spanned! {mixed=>
                ::core::result::Result::Err(err) if #private::Error::is_contended(&err) => return #it,
            }
        });
        let failure = quote_spanned!(*blame=> #blamed::Outcome::lock_failed(err));
        quote_spanned! {mixed=>
            #busy
            ::core::result::Result::Err(err) => return #failure,
        }
    }

    fn key(&self, key: &Key) -> TokenStream {
        let private = &self.private;
        let mixed = Span::mixed_site();
        let (template, span) = match key {
            Key::Expr(key) => return quote_spanned!(mixed=> #private::key(#key)),
            Key::Template(template, span) => (template, *span),
        };
        if let Some(constant) = template.constant() {
            return quote_spanned!(mixed=> #private::key(#constant));
        }
        let reserved = template.reserved();
        let pieces = template.pieces.iter().map(|it| match it {
            Piece::Text(text) => quote_spanned!(mixed=> .literal(#text)),
            Piece::Capture { name, format } => {
                // At the literal, so that the name means what it means to `format!` there.
                let colon = if format.is_empty() { "" } else { ":" };
                let capture = LitStr::new(&format!("{{{name}{colon}{format}}}"), span);
                quote_spanned!(span.resolved_at(mixed)=> .capture(::core::format_args!(#capture)))
            }
        });
        quote_spanned!(mixed=> #private::KeyText::new(#reserved)#(#pieces)*.finish())
    }
}
