//! Work whose answer is stored: the body runs in a transaction, unless the answer is there.

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::spanned::Spanned;

use crate::with_lock::{
    expand::{
        Expander,
        section::Transaction,
        spans::{at, own, test_of},
    },
    plan::{Answers, Idempotent},
};

impl Expander<'_> {
    pub(super) fn idempotent(&self, idempotent: &Idempotent) -> TokenStream {
        let Idempotent { on, key, answers, wait, on_busy, tx } = idempotent;
        let Answers { request, keep, max_answer, store_err } = answers;
        let Self { private, blamed, blame, answer, .. } = self;
        let valued = at(private, *answer);
        let mixed = Span::mixed_site();
        let (pool, asked, stored, answering) = (own("pool"), own("asked"), own("stored"), own("answering"));
        let (body, result, form, forms) = (own("body"), own("result"), own("form"), own("forms"));
        let reached = self.pool("answers_pool", on);
        let key = self.key(key);
        let request = request.as_ref().map(|it| {
            // At the value: rustc reports there what it is not.
            let span = it.span().resolved_at(mixed);
            quote_spanned!(span=> .request(&(#it)))
        });
        let keep = keep.as_ref().map(|it| quote_spanned!(mixed=> .keep(#it)));
        let wait = wait.as_ref().map(|it| quote_spanned!(mixed=> .wait(#private::wait(#it))));
        let max_answer = max_answer.as_ref().map(|it| quote_spanned!(mixed=> .max_answer(#it)));
        let form_of = quote_spanned!(*answer=> #valued::answer_form());
        let stored_as = match store_err {
            None => quote_spanned!(mixed=> #private::answers(#form)),
            Some(test) => {
                let span = test.span().resolved_at(mixed);
                let (private, test) = (at(private, span), test_of(test));
                let errs = Ident::new(if self.maps { "answer_errs_mapped" } else { "answer_errs" }, span);
                quote_spanned!(span=> #private::answers_and_errs(#form, #private::#errs(#test)))
            }
        };
        let failed = self.return_failure(on_busy.as_ref());
        let before = self.blame(quote_spanned!(*blame=> #blamed::answer_before(#stored, &#forms)));
        let Transaction { name: tx, touched, unused } = self.transaction(tx);
        let future = self.future(&unused);
        let finish = self.blame(quote_spanned!(*blame=> #blamed::end_answer(#answering, #tx, #result, #forms).await));
        quote_spanned! {mixed=>
            let #pool = #reached;
            let #form = #form_of;
            let #forms = #stored_as;
            let #asked = #private::Idempotent::key(#key) #request #keep #wait #max_answer;
            let (mut #tx, #answering) = match #private::answer_tx(&#pool, #asked, &#forms).await {
                ::core::result::Result::Ok(#private::Begun::Now(#tx, #answering)) => (#tx, #answering),
                ::core::result::Result::Ok(#private::Begun::Before(#stored)) => return #before,
                #failed
            };
            #touched
            let #result = {
                let #body = ::core::pin::pin!(#future);
                #private::under_answer(&#pool, &#answering, #body).await
            };
            #finish
        }
    }
}
