//! The retry loop of `row`, `named` and `version`.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::{Expr, spanned::Spanned};

use crate::with_lock::{
    expand::{
        Expander,
        section::{Transaction, with_rows},
        spans::{at, own, test_of},
    },
    forms::Typed,
    plan::{Retry, Version},
};

/// The transaction of one attempt.
pub(super) struct Attempt<'a> {
    pub(super) tx: &'a Ident,
    pub(super) rows: Option<&'a Typed>,
    /// The future that begins it.
    pub(super) begin: TokenStream,
    /// The future that runs the body in it.
    pub(super) under: TokenStream,
}

impl Expander<'_> {
    pub(super) fn version(&self, version: &Version) -> TokenStream {
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

    /// The loop. The deadline does not bound the commit: a commit that it cut off would have an unknown outcome.
    pub(super) fn retried(
        &self,
        terms: &Retry,
        before: &TokenStream,
        attempt: Option<Attempt<'_>>,
        on_busy: Option<&Expr>,
    ) -> TokenStream {
        let Retry { at: again, attempts, deadline, test, bind } = terms;
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
                let bound = with_rows(private, &tx, rows);
                let future = self.future(&unused);
                let busy = on_busy.map(|busy| {
                    let busy = self.result(busy);
                    quote_spanned! {mixed=>
                        ::core::option::Option::Some(::core::result::Result::Err(#err))
                            if #private::Error::is_contended(&#err) => return #busy,
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
            Some(test) => {
                let span = test.span().resolved_at(mixed);
                let (private, worth) = (at(private, span), own("worth"));
                let test = test_of(test);
                let step = self.blame(quote_spanned!(*blame=> #blamed::step_if(&mut #retry, #ended, #worth).await));
                let is_worth = if self.maps { "is_worth_another_mapped" } else { "is_worth_another" };
                let is_worth = Ident::new(is_worth, span);
                quote_spanned! {span=> {
                    let #worth = #private::#is_worth(&#ended, #test);
                    #step
                } }
            }
        };
        let repeated = quote_spanned! {again.resolved_at(mixed)=>
            loop {
                #start
                #attempt
                if let ::core::option::Option::Some(#result) = #step {
                    break #result;
                }
            }
        };
        quote_spanned! {mixed=>
            #before
            let mut #retry = match #private::retry(#attempts, #deadline) {
                ::core::result::Result::Ok(#ok) => #ok,
                #failed
            };
            #repeated
        }
    }
}
