//! What the function becomes: calls to `lockkit::__private`, around the user's body.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{
    Expr, GenericArgument, LitStr, PathArguments, PathSegment, Signature, Type, TypePath, ext::IdentExt,
    spanned::Spanned,
};

use crate::with_lock::{
    args::{Args, Errors, Typed},
    body::{Body, Mode},
    columns::By,
    function::Function,
    plan::{Key, Keys, Lease, Lock, Named, Plan, Retry, Row, Section, Session, Terms, Version},
    rewritten::{Site, map, rename_self},
    stack,
    template::Piece,
    uses,
};

/// The argument of an attribute that goes on nothing.
const IN_USE: &str = "__in_use";

/// The whole attribute. After an error of its own the function is still there, without it. The error stands beside it: rustc
/// then does not report the names that the body would have had from the attribute.
pub(crate) fn with_lock(args: TokenStream, item: &TokenStream) -> TokenStream {
    if matches!(&*args.clone().into_iter().collect::<Vec<_>>(), [TokenTree::Ident(only)] if only == IN_USE) {
        return TokenStream::new();
    }
    let mut errors = Errors::default();
    let Some(mut function) = errors.note(syn::parse2::<Function>(item.clone())) else {
        Plan::new(Args::parse(args, &mut errors), &mut errors);
        let errors = errors.into_tokens();
        return quote!(#errors #item);
    };
    let mut attributes = vec![args];
    let stacked = function.take_stacked();
    let in_use = Ident::new(IN_USE, Span::call_site());
    // So that the imports of those attributes are used, and editors know what they are.
    let used: TokenStream = stacked.iter().map(|(path, _)| quote!(#[#path(#in_use)] const _: () = ();)).collect();
    attributes.extend(stacked.into_iter().map(|(_, args)| args));
    let expanded = checked(attributes, &function, &mut errors);
    let Function { attrs, vis, sig, brace, inner_attrs, body } = &function;
    let (outside, inside) = match expanded {
        Some(expanded) if errors.is_empty() => (TokenStream::new(), expanded),
        _ => (errors.into_tokens(), body.clone()),
    };
    let mut tokens = quote!(#outside #(#attrs)* #vis #sig);
    brace.surround(&mut tokens, |tokens| tokens.extend(quote!(#(#inner_attrs)* #used #inside)));
    tokens
}

/// The body under the locks of all these attributes, the first of which is outermost.
fn checked(attributes: Vec<TokenStream>, function: &Function, errors: &mut Errors) -> Option<TokenStream> {
    let Function { sig, brace, body, .. } = function;
    function.check(errors);
    let site = Site::of(sig, body);
    if site.is_none() && sig.constness.is_none() {
        let message = if uses::mentions(body, &Ident::new("block_on", Span::call_site())) {
            "`#[with_lock]` waits for the lock, so it needs an `async fn`; an attribute above it, such as `#[tokio::main]` \
             or `#[tokio::test]`, has made this one a plain `fn`: put `#[with_lock]` on a function that this one calls"
        } else {
            "`#[with_lock]` waits for the lock, so it needs an `async fn`"
        };
        errors.push(syn::Error::new(sig.fn_token.span, message));
    }
    if uses::mentions(body, &own("body")) {
        let message = "this lock would be taken before the one above it, which was expanded first; write both attributes as \
                       `#[with_lock(…)]`, under that name and without `cfg_attr`";
        errors.push(syn::Error::new(Span::call_site(), message));
    }
    let self_renamed = site.as_ref().is_some_and(|it| it.self_renamed);
    let mut plans = Vec::new();
    for attribute in attributes {
        let attribute = if self_renamed { rename_self(attribute) } else { attribute };
        let args = Args::parse(attribute, errors);
        let strategy = args.strategy.clone();
        plans.push((strategy, Plan::new(args, errors)));
    }
    let plans: Vec<_> = plans.into_iter().map(|(strategy, plan)| Some((strategy?, plan?))).collect::<Option<_>>()?;
    let site = site?;
    let locks: Vec<_> = plans.iter().map(|(strategy, plan)| (strategy, &plan.lock)).collect();
    stack::check(&locks, errors);
    let locks: Vec<_> = locks.into_iter().map(|(_, lock)| lock).collect();
    stack::check_body(&locks, &site.body, errors);
    let mut tokens = site.body.clone();
    for (at, (_, plan)) in plans.iter().enumerate().rev() {
        let expander = Expander::new(&plan.krate, sig, site.returns.as_ref(), tokens, brace.span.join(), &locks[..=at]);
        tokens = expander.expand(&plan.lock);
    }
    Some(site.fill(tokens))
}

/// A name of the expansion. `mixed_site` keeps variables apart from those of the user, but not from statics, constants and
/// unit structs, which a pattern of the same name would mean.
fn own(name: &str) -> Ident {
    Ident::new(&format!("{OWN}{name}"), Span::mixed_site())
}

const OWN: &str = "__lockkit_";

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

/// A call with its own names where the rest of it is. Of errors that come up in one place rustc tells one.
fn own_at(call: TokenStream, span: Span) -> TokenStream {
    map(call, &|mut token| {
        if matches!(&token, TokenTree::Ident(ident) if ident.to_string().starts_with(OWN)) {
            token.set_span(span);
        }
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

/// Expands one lock of a function. Names of its own are at `mixed_site`: the body does not see them, nor they the body's.
///
/// Bodies are pinned where they are and lent to lockkit: every function that took one by value would double the size of
/// the future, and be compiled once more for each body. They are pinned in a block of their own, so that they end before the lock
/// does.
struct Expander<'a> {
    /// `::lockkit::__private`
    private: TokenStream,
    /// The same, at the return type: for what fails to compile when that cannot carry an error of lockkit.
    blamed: TokenStream,
    blame: Span,
    body: Body,
    mode: Mode,
    /// The names of this lock and of those above it.
    bound: Vec<&'a Ident>,
}

impl<'a> Expander<'a> {
    fn new(
        krate: &TokenStream,
        sig: &Signature,
        returns: Option<&Type>,
        body: TokenStream,
        brace: Span,
        locks: &[&'a Lock],
    ) -> Self {
        let mixed = Span::mixed_site();
        let blame = returns.map_or_else(|| sig.ident.span(), span_of_error).resolved_at(mixed);
        let private = quote_spanned!(mixed=> #krate::__private);
        let blamed = at(&private, blame);
        let body = Body::new(&private, sig, returns, body, brace);
        let bound = locks.iter().flat_map(|it| it.names()).map(|(name, _)| name).collect();
        Self { private, blamed, blame, body, mode: Mode::under(locks), bound }
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
        let (leases, key, request, held, ok) = (own("leases"), own("key"), own("request"), own("held"), own("ok"));
        let (keys, ask, acquire) = match keys {
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
        let opened = at_on.call("leases", on.to_token_stream());
        let opened = at_on.call(if tx.is_some() { "leases_with_tx" } else { "own_leases" }, opened);
        let request_call = at_on.call(ask, quote_spanned!(mixed=> &#leases, #key));
        let taken = at_on.call(acquire, own_at(request.to_token_stream(), at_on.first));
        let acquire = quote_spanned! {mixed=>
            let #leases = #opened;
            let #key = #keys;
            let #request = #request_call #ttl #wait #min_hold #on_lost #fair;
            let #held = match #taken.await {
                ::core::result::Result::Ok(#ok) => #ok,
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
        let mixed = Span::mixed_site();
        let key_text = self.key(key);
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> .wait(#it)));
        let failed = self.return_failure(on_busy.as_ref());
        let (pool, key, held, ok) = (own("pool"), own("key"), own("held"), own("ok"));
        let reached = self.pool("session_pool", on);
        let acquire = quote_spanned! {mixed=>
            let #pool = #reached;
            let #key = #key_text;
            let #held = match #private::SessionLock::new(#key)#wait.acquire(&#pool).await {
                ::core::result::Result::Ok(#ok) => #ok,
                #failed
            };
        };
        self.held(&acquire, bind.as_ref())
    }

    /// The body under what `acquire` holds.
    fn held(&self, acquire: &TokenStream, bind: Option<&Ident>) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let (held, body, result) = (own("held"), own("body"), own("result"));
        let bind = bind.map(|it| quote_spanned!(mixed=> let #it = #private::lend(&#held);));
        let future = self.future(&TokenStream::new());
        let guarded = self.blame(quote_spanned!(*blame=> #blamed::guarded(&#held, #body).await));
        let finish = self.blame(quote_spanned!(*blame=> #blamed::end_held(#held, #result).await));
        quote_spanned! {mixed=>
            #acquire
            #bind
            let #result = {
                let #body = ::core::pin::pin!(#future);
                #guarded
            };
            #finish
        }
    }

    /// The same in a transaction, which is committed only if it is held until then.
    fn held_with_tx(&self, acquire: &TokenStream, bind: Option<&Ident>, tx: &Ident) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let (held, leases, body, result, ok) = (own("held"), own("leases"), own("body"), own("result"), own("ok"));
        let Transaction { name: tx, touched, unused } = self.transaction(tx);
        let future = self.future(&unused);
        let bind = bind.map(|it| quote_spanned!(mixed=> let #it = #private::lend(&#held);));
        let guarded = self.blame(quote_spanned!(*blame=> #blamed::guarded(&#held, #body).await));
        let finish = self.blame(quote_spanned!(*blame=> #blamed::end_held_tx(#held, #tx, #result).await));
        let failed = self.return_failure(None);
        quote_spanned! {mixed=>
            #acquire
            let mut #tx = match #private::lease_tx(&#leases).await {
                ::core::result::Result::Ok(#ok) => #ok,
                #failed
            };
            #touched
            #bind
            let #result = {
                let #body = ::core::pin::pin!(#future);
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
        let (pool, key, wait) = (own("pool"), own("key"), own("wait"));
        let name = |column: &Ident| LitStr::new(&column.unraw().to_string(), column.span());
        let cloned =
            |value: &Expr| quote_spanned!(value.span().resolved_at(mixed)=> ::core::clone::Clone::clone(&(#value)));
        let values = by.iter().map(|it| ("by", it)).chain(by_any.iter().map(|it| ("by_any", it)));
        let lock = values.fold(quote_spanned!(mixed=> #private::row_lock(&#pool, #table)), |lock, (by, it)| {
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
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(#wait)));
        let lock = quote_spanned!(mixed=> #lock #(#order_by)* #limit #skip_locked #wait);
        let begin = |deadline: TokenStream| {
            let Some(Typed { ty, .. }) = &section.rows else {
                return quote_spanned!(mixed=> #private::row_tx(&#pool, #deadline, #lock));
            };
            // At the type: what is wrong with it, rustc reports there.
            let span = span_of_rows(section.rows.as_ref());
            let private = at(private, span);
            let ty = quote_spanned!(span=> ::core::marker::PhantomData::<#ty>);
            quote_spanned!(span=> #private::row_tx_with_rows(&#pool, #deadline, #lock, #ty))
        };
        let before = quote_spanned!(mixed=> let #key = #private::key(#table););
        self.section(section, &before, "row_pool", &begin, "under_rows")
    }

    fn named(&self, key: &Key, section: &Section) -> TokenStream {
        let private = &self.private;
        let mixed = Span::mixed_site();
        let text = self.key(key);
        let (pool, key, wait) = (own("pool"), own("key"), own("wait"));
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(#wait)));
        let lock = quote_spanned!(mixed=> #private::NamedLock::new(&#key)#wait);
        let begin = |deadline: TokenStream| quote_spanned!(mixed=> #private::named_tx(&#pool, #deadline, #lock));
        let before = quote_spanned!(mixed=> let #key = #text;);
        self.section(section, &before, "named_pool", &begin, "under_name")
    }

    /// One transaction under a lock: once, or as often as the retry says. `begin` begins it before the deadline.
    fn section(
        &self,
        section: &Section,
        before: &TokenStream,
        pool_of: &str,
        begin: &dyn Fn(TokenStream) -> TokenStream,
        under: &str,
    ) -> TokenStream {
        let Section { on, wait, on_busy, tx, rows, retry } = section;
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let (pool, key, body, result, ok) = (own("pool"), own("key"), own("body"), own("result"), own("ok"));
        let reached = self.pool(pool_of, on);
        let wait = wait.as_ref().map(|it| {
            let wait = own("wait");
            quote_spanned!(mixed=> let #wait = #private::wait(#it);)
        });
        let before = quote_spanned! {mixed=>
            let #pool = #reached;
            #before
            #wait
        };
        if let Some(retry) = retry {
            let under = Ident::new(&format!("{under}_until"), mixed);
            let retry_name = own("retry");
            let begin = begin(quote_spanned!(mixed=> #private::Retry::deadline(&#retry_name)));
            let begin = if rows.is_some() {
                // Or what is wrong with their type would be wrong with all that polls this.
                quote_spanned!(span_of_rows(rows.as_ref())=> async { #begin.await })
            } else {
                begin
            };
            let under = quote_spanned!(mixed=> #private::#under(&#pool, &#key, &#retry_name, #body));
            let attempt = Attempt { tx, rows: rows.as_ref(), begin, under };
            return self.retried(retry, &before, Some(attempt), on_busy.as_ref());
        }
        let under = Ident::new(under, mixed);
        let failed = self.return_failure(on_busy.as_ref());
        let begin = begin(quote_spanned!(mixed=> ::core::option::Option::None));
        let opened = quote_spanned!(span_of_rows(rows.as_ref())=> #begin.await);
        let Transaction { name: tx, touched, unused } = self.transaction(tx);
        let bound = with_rows(&tx, rows.as_ref());
        let future = self.future(&unused);
        let finish = self.blame(quote_spanned!(*blame=> #blamed::end_tx(#tx, #result).await));
        quote_spanned! {mixed=>
            #before
            let #bound = match #opened {
                ::core::result::Result::Ok(#ok) => #ok,
                #failed
            };
            #touched
            let #result = {
                let #body = ::core::pin::pin!(#future);
                #private::#under(&#pool, &#key, #body).await
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
                let (pool, retry_name, body) = (own("pool"), own("retry"), own("body"));
                let reached = self.pool("known_pool", on);
                let before = quote_spanned!(mixed=> let #pool = #reached;);
                let begin = quote_spanned!(mixed=> #private::plain_tx(&#pool, #private::Retry::deadline(&#retry_name)));
                let under = quote_spanned!(mixed=> #private::until(&#retry_name, #body));
                self.retried(retry, &before, Some(Attempt { tx, rows: None, begin, under }), None)
            }
        }
    }

    /// The loop. The commit is outside of the deadline: a deadline that cut it off would leave its outcome unknown.
    fn retried(
        &self,
        terms: &Retry,
        before: &TokenStream,
        attempt: Option<Attempt<'_>>,
        on_busy: Option<&Expr>,
    ) -> TokenStream {
        let Retry { attempts, deadline, test, bind } = terms;
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let (retry, body, ended, result) = (own("retry"), own("body"), own("ended"), own("result"));
        let (tried, ok, err) = (own("tried"), own("ok"), own("err"));
        let failed = self.return_failure(None);
        let none = || quote_spanned!(mixed=> ::core::option::Option::None);
        let some = |it: TokenStream| quote_spanned!(mixed=> ::core::option::Option::Some(#it));
        let attempts = attempts.as_ref().map_or_else(none, |it| some(it.to_token_stream()));
        let deadline = deadline.clone().map_or_else(none, some);
        let start = quote_spanned!(mixed=> #private::Retry::start(&mut #retry););
        let start = match bind {
            Some(bind) => quote_spanned!(mixed=> let #bind: u32 = #start),
            None => start,
        };
        let attempt = match attempt {
            None => {
                let future = self.future(&TokenStream::new());
                quote_spanned! {mixed=>
                    let #ended = {
                        let #body = ::core::pin::pin!(#future);
                        #private::until(&#retry, #body).await
                    };
                }
            }
            Some(Attempt { tx, rows, begin, under }) => {
                let Transaction { name: tx, touched, unused } = self.transaction(tx);
                let bound = with_rows(&tx, rows);
                let future = self.future(&unused);
                let busy = on_busy.map(|it| {
                    quote_spanned! {mixed=>
                        ::core::option::Option::Some(::core::result::Result::Err(#err))
                            if #private::Error::is_contended(&#err) => return #it,
                    }
                });
                let lock_failed = self.blame(quote_spanned!(*blame=> #blamed::Outcome::lock_failed(#err)));
                let finish = self.blame(quote_spanned!(*blame=> #blamed::end_attempt(#tx, #ended).await));
                quote_spanned! {mixed=>
                    let #tried = {
                        let #body = ::core::pin::pin!(#begin);
                        #private::until(&#retry, #body).await
                    };
                    let #ended = match #tried {
                        ::core::option::Option::Some(::core::result::Result::Ok(#ok)) => {
                            let #bound = #ok;
                            #touched
                            let #ended = {
                                let #body = ::core::pin::pin!(#future);
                                #under.await
                            };
                            #finish
                        }
                        #busy
                        ::core::option::Option::Some(::core::result::Result::Err(#err)) => {
                            ::core::option::Option::Some(#lock_failed)
                        }
                        ::core::option::Option::None => ::core::option::Option::None,
                    };
                }
            }
        };
        let step = match test {
            None => self.blame(quote_spanned!(*blame=> #blamed::step(&mut #retry, #ended).await)),
            Some(test) => self.blame(quote_spanned!(*blame=> #blamed::step_if(&mut #retry, #ended, #test).await)),
        };
        quote_spanned! {mixed=>
            #before
            let mut #retry = match #private::retry(#attempts, #deadline) {
                ::core::result::Result::Ok(#ok) => #ok,
                #failed
            };
            loop {
                #start
                #attempt
                if let ::core::option::Option::Some(#result) = #step {
                    break #result;
                }
            }
        }
    }

    /// The body; `first` runs before it.
    fn future(&self, first: &TokenStream) -> TokenStream {
        self.body.future(self.mode, &self.bound, first)
    }

    /// How a transaction is bound. The expansion uses its variable too, which would keep rustc from warning where the body does
    /// not; so there the body gets another variable of that name.
    fn transaction(&self, name: &Ident) -> Transaction {
        let mixed = Span::mixed_site();
        if uses::is_used(&self.body.tokens, name) {
            // Or the `mut` would be unused where the body only reads it.
            return Transaction {
                name: name.clone(),
                touched: quote_spanned!(mixed=> let _ = &mut #name;),
                unused: TokenStream::new(),
            };
        }
        let hidden = own("tx");
        let is_silent = name.unraw().to_string().starts_with('_');
        let unused = if is_silent { TokenStream::new() } else { quote_spanned!(mixed=> let #name = false;) };
        Transaction { touched: quote_spanned!(mixed=> let _ = &mut #hidden;), name: hidden, unused }
    }

    /// What fails to compile when the return type cannot carry an error of lockkit.
    fn blame(&self, call: TokenStream) -> TokenStream {
        own_at(call, self.blame)
    }

    /// The arms of a `match` that leave the function.
    fn return_failure(&self, on_busy: Option<&Expr>) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let err = own("err");
        let busy = on_busy.map(|it| {
            quote_spanned! {mixed=>
                ::core::result::Result::Err(#err) if #private::Error::is_contended(&#err) => return #it,
            }
        });
        let failure = self.blame(quote_spanned!(*blame=> #blamed::Outcome::lock_failed(#err)));
        quote_spanned! {mixed=>
            #busy
            ::core::result::Result::Err(#err) => return #failure,
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
            Piece::Text(text) => quote_spanned!(mixed=> #private::Piece::Text(#text)),
            Piece::Capture { name, format } => {
                // At the literal, so that the name means what it means to `format!` there.
                let colon = if format.is_empty() { "" } else { ":" };
                let capture = LitStr::new(&format!("{{{name}{colon}{format}}}"), span);
                let capture = quote_spanned!(span.resolved_at(mixed)=> ::core::format_args!(#capture));
                quote_spanned!(mixed=> #private::Piece::Capture(#capture))
            }
        });
        quote_spanned!(mixed=> #private::key_of(#reserved, &[#(#pieces),*]))
    }
}

/// One transaction of several, one after the other.
struct Attempt<'a> {
    tx: &'a Ident,
    rows: Option<&'a Typed>,
    /// What begins it, a future.
    begin: TokenStream,
    /// What runs the body in it, a future.
    under: TokenStream,
}

/// The pattern of a transaction, with the rows where the body is to have them.
fn with_rows(tx: &Ident, rows: Option<&Typed>) -> TokenStream {
    let mixed = Span::mixed_site();
    match rows {
        None => quote_spanned!(mixed=> mut #tx),
        Some(Typed { name, .. }) => quote_spanned!(mixed=> (mut #tx, #name)),
    }
}

/// Where the type of the rows is written.
fn span_of_rows(rows: Option<&Typed>) -> Span {
    let mixed = Span::mixed_site();
    rows.map_or(mixed, |it| it.ty.span().resolved_at(mixed))
}

/// See [`Expander::transaction`].
struct Transaction {
    /// The variable of the expansion.
    name: Ident,
    touched: TokenStream,
    /// The variable that the body does not use.
    unused: TokenStream,
}
