//! In a crate that forbids what an expansion would like to allow, and with names in scope that an expansion might use.

use crate::fixture::{Shop, assert_send};

/// Constants and unit structs are patterns, so a local variable of their name would not be one.
mod shadowed {
    #![allow(dead_code, non_upper_case_globals, non_camel_case_types)]

    macro_rules! constants {
        ($($name:ident)*) => { $(pub(crate) const $name: u8 = 1;)* };
    }
    macro_rules! units {
        ($($name:ident)*) => { $(pub(crate) struct $name;)* };
    }
    macro_rules! statics {
        ($($name:ident)*) => { $(pub(crate) static $name: u8 = 1;)* };
    }

    constants! { pool key keys held lease_of lock request leases attempt number on never begun value busy }
    units! { unit result body wait retry deadline err failed }
    statics! { body_of guarded ended tried tx_of acquire span conn policy }
}

#[forbid(unused_variables, unused_mut, unused_assignments, unreachable_code, unused_imports, clippy::all)]
#[deny(warnings, clippy::pedantic)]
mod locked {
    use super::shadowed::*;
    use lockkit::{Error, LeaseStore, Leases, with_lock};

    use crate::fixture::{Shop, ShopError, sell};

    /// They are in scope.
    const _: u8 = pool;

    #[with_lock(lease, on = &shop.leases, key = "a:{id}", ttl = "5s", wait = "1s", as = lease, on_busy = Ok(0))]
    pub(super) async fn leased(shop: &Shop, id: u8) -> Result<u64, ShopError> {
        Ok(lease.fence().get())
    }

    #[with_lock(lease, on = &shop.leases, keys = ["b:{id}", "c"], as = both, tx = tx)]
    pub(super) async fn leased_with_tx(shop: &Shop, id: u8) -> Result<usize, ShopError> {
        sell(&mut tx).await?;
        Ok(both.leases().len())
    }

    #[with_lock(row, on = &shop.db, table = "t_items", by(item_id = id), wait = "1s", tx = tx)]
    pub(super) async fn row(shop: &Shop, id: i64, name: String) -> Result<String, ShopError> {
        sell(&mut tx).await?;
        Ok(name)
    }

    #[with_lock(lease, on = &shop.leases, key = "r")]
    #[with_lock(
        row,
        on = &shop.db,
        table = "t_items",
        by(item_id = 7),
        rows = items: Vec<(i64, i64, i64)>,
        attempts = 2,
        tx = tx
    )]
    pub(super) async fn rows(shop: &Shop) -> Result<usize, ShopError> {
        sell(&mut tx).await?;
        Ok(items.len())
    }

    #[with_lock(named, on = &shop.db, key = "d", attempts = 2, deadline = "9s", as = time, on_busy = Ok(0), tx = tx)]
    pub(super) async fn named(shop: &Shop) -> Result<u32, ShopError> {
        sell(&mut tx).await?;
        Ok(time)
    }

    #[with_lock(version, on = &shop.db, attempts = 2, tx = tx)]
    pub(super) async fn version(shop: &Shop) -> Result<(), ShopError> {
        sell(&mut tx).await?;
        Ok(())
    }

    /// A name with an underscore says that it is not used.
    #[with_lock(named, on = &shop.db, key = "d", tx = _tx)]
    pub(super) async fn unused_tx(shop: &Shop) -> Result<(), ShopError> {
        Ok(())
    }

    #[with_lock(lease, on = of, key = "e", as = _lease)]
    pub(super) async fn unused_lease<S: LeaseStore>(of: &Leases<S>) -> Result<(), Error> {
        Ok(())
    }

    #[with_lock(version, attempts = 2, as = _attempt)]
    pub(super) async fn unused_attempt() -> Result<(), Error> {
        Ok(())
    }

    #[with_lock(lease, on = &shop.leases, key = "f", as = _lease, tx = _tx)]
    pub(super) async fn unused_both(shop: &Shop) -> Result<(), ShopError> {
        Ok(())
    }

    /// Used in one branch, in a closure, only read, and in the text of a format.
    #[with_lock(row, on = &shop.db, table = "t_items", by(item_id = 7), tx = tx)]
    pub(super) async fn used_in_one_branch(shop: &Shop, sells: bool) -> Result<(), ShopError> {
        if sells {
            sell(&mut tx).await?;
        }
        Ok(())
    }

    #[with_lock(named, on = &shop.db, key = "g", attempts = 2, tx = tx)]
    pub(super) async fn used_in_a_closure(shop: &Shop) -> Result<(), ShopError> {
        let mut selling = async || sell(&mut tx).await;
        selling().await?;
        Ok(())
    }

    #[with_lock(named, on = &shop.db, key = "g", tx = tx)]
    pub(super) async fn only_printed(shop: &Shop) -> Result<String, ShopError> {
        Ok(format!("{tx:?}"))
    }
}

#[tokio::test]
async fn an_expansion_needs_no_lint_allowed_and_no_name_free() {
    use locked::{
        leased, leased_with_tx, named, only_printed, row, rows, unused_attempt, unused_both, unused_lease, unused_tx,
        used_in_a_closure, used_in_one_branch, version,
    };

    let shop = Shop::new().await;
    assert!(assert_send(leased(&shop, 1)).await.unwrap() > 0);
    assert_eq!(assert_send(leased_with_tx(&shop, 1)).await.unwrap(), 2);
    assert_eq!(assert_send(row(&shop, 7, "n".to_owned())).await.unwrap(), "n");
    assert_eq!(assert_send(rows(&shop)).await.unwrap(), 1);
    assert_eq!(assert_send(named(&shop)).await.unwrap(), 1);
    assert_send(version(&shop)).await.unwrap();
    assert_send(unused_tx(&shop)).await.unwrap();
    assert_send(unused_lease(&shop.leases)).await.unwrap();
    assert_send(unused_attempt()).await.unwrap();
    assert_send(unused_both(&shop)).await.unwrap();
    assert_send(used_in_one_branch(&shop, true)).await.unwrap();
    used_in_a_closure(&shop).await.unwrap();
    assert!(only_printed(&shop).await.unwrap().starts_with("Tx"));
    assert_eq!(shop.stock().await, 3);
}
