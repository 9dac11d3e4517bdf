//! What the function becomes: calls to `lockkit::__private`, around the user's body.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Expr, LitStr, ReturnType, Signature, Type, ext::IdentExt, spanned::Spanned};

use crate::{
    args::{Args, By, Errors},
    body::Body,
    function::Function,
    plan::{Key, Keys, Lease, Lock, Named, Plan, Retry, Row, Section, Session, Terms, Version},
    rewritten::{Boxed, map, rename_self},
    template::Piece,
};

/// The whole attribute. After an error of its own the function is still there, unchanged.
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
                let message = "`#[with_lock]` waits for the lock, so it needs an `async fn`";
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
        let blame = returns.as_ref().map_or_else(|| sig.ident.span(), Spanned::span).resolved_at(mixed);
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
        let body = Body::new(sig, returns, body, brace);
        Self { private, blamed, blame, body }
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
        let acquire = quote_spanned! {mixed=>
            let leases = #private::leases(#on);
            let keys = #keys;
            let request = #private::#request(&leases, keys)#ttl #wait #min_hold #on_lost #fair;
            let held = match request.acquire().await {
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
        let mixed = Span::mixed_site();
        let key = self.key(key);
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> .wait(#it)));
        let failed = self.return_failure(on_busy.as_ref());
        let acquire = quote_spanned! {mixed=>
            let pool = #private::session_pool(#on);
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

    fn row(&self, table: &LitStr, by: &[By], section: &Section) -> TokenStream {
        let private = &self.private;
        let mixed = Span::mixed_site();
        let by = by.iter().map(|By { column, value }| {
            let column = LitStr::new(&column.unraw().to_string(), column.span());
            let value = quote_spanned!(value.span().resolved_at(mixed)=> ::core::clone::Clone::clone(&(#value)));
            quote_spanned!(mixed=> .by(#column, #value))
        });
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(wait)));
        let lock = quote_spanned!(mixed=> #private::row_lock(&pool, #table)#(#by)* #wait);
        self.section(
            section,
            &quote_spanned!(mixed=> let key = #private::key(#table);),
            &lock,
            &quote_spanned!(mixed=> row_tx),
            &quote_spanned!(mixed=> under_rows),
        )
    }

    fn named(&self, key: &Key, section: &Section) -> TokenStream {
        let private = &self.private;
        let mixed = Span::mixed_site();
        let key = self.key(key);
        let wait = section.wait.as_ref().map(|_| quote_spanned!(mixed=> .wait(wait)));
        let lock = quote_spanned!(mixed=> #private::NamedLock::new(&key)#wait);
        self.section(
            section,
            &quote_spanned!(mixed=> let key = #key;),
            &lock,
            &quote_spanned!(mixed=> named_tx),
            &quote_spanned!(mixed=> under_name),
        )
    }

    /// One transaction under a lock: once, or as often as the retry says.
    fn section(
        &self,
        section: &Section,
        before: &TokenStream,
        lock: &TokenStream,
        begin: &TokenStream,
        under: &TokenStream,
    ) -> TokenStream {
        let Section { on, wait, on_busy, tx, retry } = section;
        let private = &self.private;
        let mixed = Span::mixed_site();
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> let wait = #private::wait(#it);));
        let before = quote_spanned! {mixed=>
            let pool = #private::pool(#on);
            #before
            #wait
        };
        if let Some(retry) = retry {
            let begin = quote_spanned! {mixed=>
                let lock = #lock;
                let begun = #private::#begin(&pool, deadline, lock).await;
            };
            let under = quote_spanned!(mixed=> #private::#under(&pool, &key, body));
            return self.retried(retry, &before, Some((tx, begin, under)), on_busy.as_ref());
        }
        let failed = self.return_failure(on_busy.as_ref());
        let body = self.body.lending(&[Some(tx)]);
        let finish = self.end_tx(tx);
        quote_spanned! {mixed=>
            #before
            let lock = #lock;
            #[allow(unused_mut, unused_variables)]
            let mut #tx = match #private::#begin(&pool, ::core::option::Option::None, lock).await {
                ::core::result::Result::Ok(tx) => tx,
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
                let before = quote_spanned!(mixed=> let pool = #private::pool(#on););
                let begin = quote_spanned!(mixed=> let begun = #private::plain_tx(&pool, deadline).await;);
                self.retried(retry, &before, Some((tx, begin, quote_spanned!(mixed=> body))), None)
            }
        }
    }

    /// The loop. The commit is outside of the deadline: a deadline that cut it off would leave its outcome unknown.
    fn retried(
        &self,
        retry: &Retry,
        before: &TokenStream,
        tx: Option<(&Ident, TokenStream, TokenStream)>,
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
            Some((tx, begin, under)) => {
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
                                ::core::result::Result::Ok(mut #tx) => {
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
