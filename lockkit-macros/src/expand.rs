//! What the function becomes: calls to `lockkit::__private`, around the user's body.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Expr, LitStr, Signature, Type, ext::IdentExt, spanned::Spanned};

use crate::{
    args::{Args, By, Errors},
    body::{Body, Mode},
    function::Function,
    plan::{Key, Keys, Lease, Lock, Named, Plan, Retry, Row, Section, Session, Terms, Version},
    rewritten::{Site, map, rename_self},
    stack,
    template::Piece,
    uses,
};

/// The argument of an attribute that goes on nothing.
const IN_USE: &str = "__in_use";

/// The whole attribute. After an error of its own the function is still there, with the names that it would have given to
/// the body.
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
    let mut names = Vec::new();
    let mut attributes = vec![args];
    let stacked = function.take_stacked();
    let in_use = Ident::new(IN_USE, Span::call_site());
    // So that the imports of those attributes are used, and editors know what they are.
    let used: TokenStream = stacked.iter().map(|(path, _)| quote!(#[#path(#in_use)] const _: () = ();)).collect();
    attributes.extend(stacked.into_iter().map(|(_, args)| args));
    let expanded = checked(attributes, &function, &mut names, &mut errors);
    let Function { attrs, vis, sig, brace, inner_attrs, body } = &function;
    let (outside, inside) = match expanded {
        Some(expanded) if errors.is_empty() => (TokenStream::new(), expanded),
        _ if names.is_empty() => (errors.into_tokens(), body.clone()),
        _ => {
            // What has the type of an error makes no other errors.
            let errors = errors.into_tokens();
            (TokenStream::new(), quote!(let (#(mut #names,)*) = { #errors }; #body))
        }
    };
    let mut tokens = quote!(#outside #(#attrs)* #vis #sig);
    brace.surround(&mut tokens, |tokens| tokens.extend(quote!(#(#inner_attrs)* #used #inside)));
    tokens
}

/// The body under the locks of all these attributes, the first of which is outermost. `names` are those that it has from them.
fn checked(
    attributes: Vec<TokenStream>,
    function: &Function,
    names: &mut Vec<Ident>,
    errors: &mut Errors,
) -> Option<TokenStream> {
    let Function { sig, brace, body, .. } = function;
    function.check(errors);
    let site = Site::of(sig, body);
    if site.is_none() && sig.constness.is_none() {
        let message = "`#[with_lock]` waits for the lock, so it needs an `async fn`";
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
        let given = [&args.tx, &args.bind].into_iter().flatten().map(|it| it.value.clone());
        names.extend(given.filter(|it| *it != "_"));
        // The one that is missing has most likely this name in the body.
        if let (None, Some(strategy)) = (&args.tx, &strategy)
            && (strategy == "row" || strategy == "named")
        {
            names.push(Ident::new("tx", strategy.span()));
        }
        plans.push((strategy, Plan::new(args, errors)));
    }
    names.sort();
    names.dedup();
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
        let blame = returns.map_or_else(|| sig.ident.span(), Spanned::span).resolved_at(mixed);
        let private = quote_spanned!(mixed=> #krate::__private);
        // Every token must be at the type, or rustc blames the whole attribute.
        let is_dollar_crate = |it: TokenTree| matches!(it, TokenTree::Ident(it) if it == "$crate");
        let blamed = if private.clone().into_iter().any(is_dollar_crate) {
            private.clone()
        } else {
            map(private.clone(), &|mut token| {
                token.set_span(blame);
                token
            })
        };
        let body = Body::new(&private, sig, returns, body, brace);
        let bound = locks.iter().flat_map(|it| it.names()).map(|(name, _)| name).collect();
        Self { private, blamed, blame, body, mode: Mode::under(locks), bound }
    }

    fn expand(&self, lock: &Lock) -> TokenStream {
        match lock {
            Lock::Lease(lease) => self.lease(lease),
            Lock::Row(Row { table, by, section }) => self.row(table, by, section),
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
        let (key, held) = (own("key"), own("held"));
        let (keys, request) = match keys {
            Keys::One(key) => (self.key(key), quote_spanned!(mixed=> lease)),
            Keys::Each(keys) => {
                let keys = keys.iter().map(|it| self.key(it));
                (quote_spanned!(mixed=> [#(#keys),*]), quote_spanned!(mixed=> leases_of_all))
            }
            Keys::Expr(keys) => (quote_spanned!(mixed=> #private::keys(#keys)), quote_spanned!(mixed=> leases_of_all)),
        };
        let ttl = ttl.as_ref().map(|it| quote_spanned!(mixed=> .ttl(#it)));
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> .wait(#it)));
        let min_hold = min_hold.as_ref().map(|it| quote_spanned!(mixed=> .min_hold(#it)));
        let on_lost = on_lost.as_ref().map(|it| quote_spanned!(mixed=> .on_lost(#private::OnLost::#it)));
        let fair = is_fair.then(|| quote_spanned!(mixed=> .fair()));
        let failed = self.return_failure(on_busy.as_ref());
        let ok = own("ok");
        let leases = own("leases");
        let acquire = quote_spanned! {mixed=>
            let #leases = #private::leases(#on);
            let #key = #keys;
            let #held = match #private::#request(&#leases, #key)#ttl #wait #min_hold #on_lost #fair.acquire().await {
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
        let acquire = quote_spanned! {mixed=>
            let #pool = #private::session_pool(#on);
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

    fn row(&self, table: &LitStr, by: &[By], section: &Section) -> TokenStream {
        let private = &self.private;
        let mixed = Span::mixed_site();
        let (pool, key, wait) = (own("pool"), own("key"), own("wait"));
        let by = by.iter().map(|By { column, value }| {
            let column = LitStr::new(&column.unraw().to_string(), column.span());
            let value = quote_spanned!(value.span().resolved_at(mixed)=> ::core::clone::Clone::clone(&(#value)));
            quote_spanned!(mixed=> .by(#column, #value))
        });
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(#wait)));
        let lock = quote_spanned!(mixed=> #private::row_lock(&#pool, #table)#(#by)* #wait);
        self.section(
            section,
            &quote_spanned!(mixed=> let #key = #private::key(#table);),
            &lock,
            ["row_tx", "under_rows"],
        )
    }

    fn named(&self, key: &Key, section: &Section) -> TokenStream {
        let private = &self.private;
        let mixed = Span::mixed_site();
        let text = self.key(key);
        let (key, wait) = (own("key"), own("wait"));
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(#wait)));
        let lock = quote_spanned!(mixed=> #private::NamedLock::new(&#key)#wait);
        self.section(section, &quote_spanned!(mixed=> let #key = #text;), &lock, ["named_tx", "under_name"])
    }

    /// One transaction under a lock: once, or as often as the retry says.
    fn section(
        &self,
        section: &Section,
        before: &TokenStream,
        lock: &TokenStream,
        [begin, under]: [&str; 2],
    ) -> TokenStream {
        let Section { on, wait, on_busy, tx, retry } = section;
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let (pool, key, body, result, ok) = (own("pool"), own("key"), own("body"), own("result"), own("ok"));
        let wait = wait.as_ref().map(|it| {
            let wait = own("wait");
            quote_spanned!(mixed=> let #wait = #private::wait(#it);)
        });
        let before = quote_spanned! {mixed=>
            let #pool = #private::pool(#on);
            #before
            #wait
        };
        if let Some(retry) = retry {
            let begin = Ident::new(begin, mixed);
            let under = Ident::new(&format!("{under}_until"), mixed);
            let retry_name = own("retry");
            let deadline = quote_spanned!(mixed=> #private::Retry::deadline(&#retry_name));
            let begin = quote_spanned!(mixed=> #private::#begin(&#pool, #deadline, #lock));
            let under = quote_spanned!(mixed=> #private::#under(&#pool, &#key, &#retry_name, #body));
            return self.retried(retry, &before, Some((tx, begin, under)), on_busy.as_ref());
        }
        let (begin, under) = (Ident::new(begin, mixed), Ident::new(under, mixed));
        let failed = self.return_failure(on_busy.as_ref());
        let Transaction { name: tx, touched, unused } = self.transaction(tx);
        let future = self.future(&unused);
        let finish = self.blame(quote_spanned!(*blame=> #blamed::end_tx(#tx, #result).await));
        quote_spanned! {mixed=>
            #before
            let mut #tx = match #private::#begin(&#pool, ::core::option::Option::None, #lock).await {
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
                let before = quote_spanned!(mixed=> let #pool = #private::pool(#on););
                let begin = quote_spanned!(mixed=> #private::plain_tx(&#pool, #private::Retry::deadline(&#retry_name)));
                let under = quote_spanned!(mixed=> #private::until(&#retry_name, #body));
                self.retried(retry, &before, Some((tx, begin, under)), None)
            }
        }
    }

    /// The loop. The commit is outside of the deadline: a deadline that cut it off would leave its outcome unknown.
    fn retried(
        &self,
        terms: &Retry,
        before: &TokenStream,
        tx: Option<(&Ident, TokenStream, TokenStream)>,
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
        let attempt = match tx {
            None => {
                let future = self.future(&TokenStream::new());
                quote_spanned! {mixed=>
                    let #ended = {
                        let #body = ::core::pin::pin!(#future);
                        #private::until(&#retry, #body).await
                    };
                }
            }
            Some((tx, begin, under)) => {
                let Transaction { name: tx, touched, unused } = self.transaction(tx);
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
                            let mut #tx = #ok;
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

    /// A call with its own names where the rest of it is. Of errors that come up in one place rustc tells one.
    fn blame(&self, call: TokenStream) -> TokenStream {
        map(call, &|mut token| {
            if matches!(&token, TokenTree::Ident(ident) if ident.to_string().starts_with(OWN)) {
                token.set_span(self.blame);
            }
            token
        })
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

/// See [`Expander::transaction`].
struct Transaction {
    /// The variable of the expansion.
    name: Ident,
    touched: TokenStream,
    /// The variable that the body does not use.
    unused: TokenStream,
}
