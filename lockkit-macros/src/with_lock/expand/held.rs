//! Leases and session locks: held around the body, which stops when they are lost.
//!
//! A session lock has no commit that fails without it, so there is no `tx`, and the release decides: `Ok` of the body
//! becomes `Err(SessionLost)`. There is no `on_lost = continue`: a leader that goes on is a second leader. The error of
//! a stopped body has no source, because the body still borrows the session that knows it.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::Expr;

use crate::with_lock::{
    expand::{
        Expander,
        section::Transaction,
        spans::{Reached, own, own_at},
    },
    plan::{Keys, Lease, Session, Terms},
};

/// The transaction of a lease.
struct HeldTx<'a> {
    /// Its name in the body.
    name: &'a Ident,
    /// The call that begins it.
    begin: TokenStream,
    /// What to return if the transaction is contended.
    on_busy: Option<&'a Expr>,
    /// The function that ends it and the lease.
    end: &'static str,
}

impl Expander<'_> {
    pub(super) fn lease(&self, lease: &Lease) -> TokenStream {
        let Lease { on, keys, terms, wait, on_busy, bind, tx, pool } = lease;
        let Terms { ttl, min_hold, on_lost, is_fair } = terms;
        let private = &self.private;
        let mixed = Span::mixed_site();
        let (leases, key, request, held, ok) = (own("leases"), own("key"), own("request"), own("held"), own("ok"));
        let (keys, ask) = match keys {
            Keys::One(key) => (self.key(key), "lease"),
            Keys::Each(keys) => {
                let keys = keys.iter().map(|it| self.key(it));
                (quote_spanned!(mixed=> [#(#keys),*]), "leases_of_all")
            }
            Keys::Expr(keys) => (quote_spanned!(mixed=> #private::keys(#keys)), "leases_of_all"),
        };
        let ttl = ttl.as_ref().map(|it| quote_spanned!(mixed=> .ttl(#it)));
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> .wait(#it)));
        let min_hold = min_hold.as_ref().map(|it| quote_spanned!(mixed=> .min_hold(#it)));
        let on_lost = on_lost.as_ref().map(|it| quote_spanned!(mixed=> .on_lost(#private::OnLost::#it)));
        let fair = is_fair.then(|| quote_spanned!(mixed=> .fair()));
        let failed = self.return_failure(on_busy.as_ref());
        let at_on = Reached::new(on, private);
        let opened = at_on.call("leases", on.to_token_stream());
        let commits_lease = tx.is_some() && pool.is_none();
        let opened = at_on.call(if commits_lease { "leases_with_tx" } else { "own_leases" }, opened);
        let request_call = at_on.call(ask, quote_spanned!(mixed=> &#leases, #key));
        let taken = at_on.call("acquire", own_at(request.to_token_stream(), at_on.first));
        let in_pool = own("pool");
        let (reached, begin, end) = match pool {
            None => (None, quote_spanned!(mixed=> #private::lease_tx(&#leases)), "end_held_tx"),
            Some(pool) => {
                let reached = self.pool("guarded_pool", pool);
                let begin = quote_spanned!(mixed=> #private::guarded_tx(&#in_pool, &#held));
                (Some(quote_spanned!(mixed=> let #in_pool = #reached;)), begin, "end_guarded_tx")
            }
        };
        let acquire = quote_spanned! {mixed=>
            #reached
            let #leases = #opened;
            let #key = #keys;
            let #request = #request_call #ttl #wait #min_hold #on_lost #fair;
            let #held = match #taken.await {
                ::core::result::Result::Ok(#ok) => #ok,
                #failed
            };
        };
        let on_busy = on_busy.as_ref().filter(|_| pool.is_some());
        let tx = tx.as_ref().map(|name| HeldTx { name, begin, on_busy, end });
        self.held(&acquire, bind.as_ref(), tx)
    }

    pub(super) fn session(&self, session: &Session) -> TokenStream {
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
        self.held(&acquire, bind.as_ref(), None)
    }

    /// The body under what `acquire` holds. A transaction is committed only if it is held until then.
    fn held(&self, acquire: &TokenStream, bind: Option<&Ident>, tx: Option<HeldTx<'_>>) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let (held, body, result, ok) = (own("held"), own("body"), own("result"), own("ok"));
        let (begin, unused, end) = match tx {
            None => {
                let end = quote_spanned!(*blame=> #blamed::end_held(#held, #result).await);
                (TokenStream::new(), TokenStream::new(), end)
            }
            Some(HeldTx { name, begin, on_busy, end }) => {
                let Transaction { name: tx, touched, unused } = self.transaction(name);
                let end = Ident::new(end, *blame);
                let failed = self.return_failure(on_busy);
                let begin = quote_spanned! {mixed=>
                    let mut #tx = match #begin.await {
                        ::core::result::Result::Ok(#ok) => #ok,
                        #failed
                    };
                    #touched
                };
                (begin, unused, quote_spanned!(*blame=> #blamed::#end(#held, #tx, #result).await))
            }
        };
        let bind = bind.map(|it| quote_spanned!(mixed=> let #it = #private::lend(&#held);));
        let future = self.future(&unused);
        let guarded = self.blame(quote_spanned!(*blame=> #blamed::guarded(&#held, #body).await));
        let finish = self.blame(end);
        quote_spanned! {mixed=>
            #acquire
            #begin
            #bind
            let #result = {
                let #body = ::core::pin::pin!(#future);
                #guarded
            };
            #finish
        }
    }
}
