//! Row and named locks: one transaction around the body, or one around each attempt.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::{Expr, LitStr, ext::IdentExt, spanned::Spanned};

use crate::with_lock::{
    columns::By,
    expand::{
        Expander,
        attempts::Attempt,
        spans::{Reached, at, own, span_of_rows},
    },
    forms::Typed,
    plan::{Key, Row, Section},
    uses,
};

/// The variables of a transaction, see [`Expander::transaction`].
pub(super) struct Transaction {
    /// The variable of the expansion.
    pub(super) name: Ident,
    pub(super) touched: TokenStream,
    /// The variable that the body does not use.
    pub(super) unused: TokenStream,
}

impl Expander<'_> {
    pub(super) fn row(&self, row: &Row) -> TokenStream {
        let Row { table, by, by_any, order_by, limit, skips_locked, section } = row;
        let private = &self.private;
        let mixed = Span::mixed_site();
        let (pool, key, wait) = (own("pool"), own("key"), own("wait"));
        let name = |column: &Ident| LitStr::new(&column.unraw().to_string(), column.span());
        let values = by.iter().map(|it| ("by", it)).chain(by_any.iter().map(|it| ("by_any", it)));
        let lock = values.fold(quote_spanned!(mixed=> #private::row_lock(&#pool, #table)), |lock, (by, it)| {
            let By { column, value } = it;
            let (by, column) = (Ident::new(by, mixed), name(column));
            // At the value: rustc reports there what it is not.
            let span = value.span().resolved_at(mixed);
            let value = quote_spanned!(span=> &(#value));
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
            let Some(Typed { ty, is_one, .. }) = &section.rows else {
                return quote_spanned!(mixed=> #private::row_tx(&#pool, #deadline, #lock));
            };
            // At the type: rustc reports there what is wrong with it.
            let span = span_of_rows(section.rows.as_ref());
            let private = at(private, span);
            let ty = if *is_one { quote_spanned!(span=> #private::One<#ty>) } else { ty.to_token_stream() };
            let ty = quote_spanned!(span=> ::core::marker::PhantomData::<#ty>);
            quote_spanned!(span=> #private::row_tx_with_rows(&#pool, #deadline, #lock, #ty))
        };
        let before = quote_spanned!(mixed=> let #key = #private::key(#table););
        self.section(section, &before, "row_pool", &begin, "under_rows")
    }

    pub(super) fn named(&self, key: &Key, section: &Section) -> TokenStream {
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

    /// One transaction under a lock, once or in a retry loop. `begin` makes the call that begins it, given the
    /// deadline.
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
        let wait = wait.as_ref().map(|given| {
            let wait = own("wait");
            quote_spanned!(mixed=> let #wait = #private::wait(#given);)
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
                // Without the block, rustc reports an error in their type at every function that polls this.
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
        let bound = with_rows(private, &tx, rows.as_ref());
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

    /// The pool, checked by one of lockkit's functions.
    pub(super) fn pool(&self, check: &str, on: &Expr) -> TokenStream {
        let at_on = Reached::new(on, &self.private);
        at_on.call(check, at_on.call("pool", on.to_token_stream()))
    }

    /// The variables of a transaction. The expansion uses its variable, so rustc would not warn of a body that does
    /// not; such a body gets another, unused variable of that name.
    pub(super) fn transaction(&self, name: &Ident) -> Transaction {
        let mixed = Span::mixed_site();
        if uses::is_used(&self.body.tokens, name) {
            // Without it the `mut` would be unused in a body that only reads.
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
}

/// The pattern of a transaction, with the rows if the body gets them.
pub(super) fn with_rows(private: &TokenStream, tx: &Ident, rows: Option<&Typed>) -> TokenStream {
    let mixed = Span::mixed_site();
    match rows {
        None => quote_spanned!(mixed=> mut #tx),
        Some(Typed { name, is_one: true, .. }) => quote_spanned!(mixed=> (mut #tx, #private::One(#name))),
        Some(Typed { name, .. }) => quote_spanned!(mixed=> (mut #tx, #name)),
    }
}
