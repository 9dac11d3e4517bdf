//! Several databases for the locks of one service: each key belongs to one of them.

use std::fmt;

use crate::value::{
    error::{Error, Result},
    key::Key,
};

/// Divides keys among several databases: each key belongs to one of them, the same in every process.
///
/// One primary limits how many locks per second its clients can take. Keys are independent of each other, so several
/// primaries can have some each. `T` is whatever there is one of for each database: its [`Leases`](crate::Leases), its pool,
/// its [`Stock`](crate::Stock).
///
/// A key belongs to the database whose name and the key together have the greatest hash (rendezvous hashing). So all
/// processes agree if they have the same names, in any order; each database gets an equal part of the keys; and a database
/// that is added takes its part from all others, while all other keys stay. The hash never changes between versions of
/// lockkit.
///
/// **All processes must have the same names.** While some have one list and some another, a key may be locked in two
/// databases at once, by two holders. To change the list: stop all processes that lock ([`Leases::close`](crate::Leases::close)
/// releases what they hold, and what a killed one held ends with its ttl), and start them with the new list. Fences of a key that moves do not continue: those of one database come from its clock, and another
/// database's clock may be behind. Renaming a database moves its keys; a new address under the same name does not.
///
/// A request that needs several keys at once ([`Leases::all`](crate::Leases::all)) needs them in one database. Then *every*
/// request for these keys must choose the database by what they have in common, such as the customer, and not by the key.
///
/// # Example
/// ```
/// use lockkit::{Leases, store::Shards};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let open = || sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:");
/// # let (north, south) = (open().await?, open().await?);
/// let shards = Shards::new([("north", Leases::new(north)), ("south", Leases::new(south))])?;
/// # for (_, leases) in shards.iter() { leases.migrate().await?; }
/// let lease = shards.of("order:42").lease("order:42").acquire().await?;
/// # lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Shards<T>(Vec<(Key, T)>);

impl<T> Shards<T> {
    /// The shards with these names, which must differ from each other.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if there is none, if two have one name, or if a name is no [`Key`].
    pub fn new(shards: impl IntoIterator<Item = (impl Into<Key>, T)>) -> Result<Self> {
        let mut shards: Vec<(Key, T)> = shards.into_iter().map(|(name, it)| (name.into(), it)).collect();
        shards.sort_by(|(a, _), (b, _)| a.cmp(b));
        let reason = if shards.is_empty() {
            "has no shard; give it at least one".to_owned()
        } else if let Some((name, _)) = shards.iter().find(|(name, _)| name.check().is_err()) {
            format!("has a shard named {:?}; a name is 1 to 255 bytes of printable text", name.as_str())
        } else if let Some(twice) = shards.windows(2).find(|it| it[0].0 == it[1].0) {
            format!("has two shards named `{}`; the names must differ", twice[0].0)
        } else {
            return Ok(Self(shards));
        };
        Err(Error::InvalidOption { option: "shards", reason })
    }

    /// The shard that this key belongs to. Leases beside the key's own, such as permits, belong to the shard of the key.
    ///
    /// # Panics
    /// Never: there is at least one shard.
    pub fn of(&self, key: impl AsRef<str>) -> &T {
        let key = key.as_ref();
        // Between equal hashes the name decides, because the shards are sorted.
        let shard = self.0.iter().max_by_key(|(name, _)| hash(name, key));
        &shard.expect("BUG: `new` refuses an empty list").1
    }

    /// All shards with their names, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &T)> {
        self.0.iter().map(|(name, it)| (name, it))
    }
}

impl<T> fmt::Debug for Shards<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.iter().map(|it| &it.0)).finish()
    }
}

/// The hash of a key at a shard: FNV-1a over the name, a byte that is in no text, and the key; then the finalizer of
/// `MurmurHash3`, because the last bytes of keys differ most and FNV alone leaves them in the lowest bits.
fn hash(name: &str, key: &str) -> u64 {
    let bytes = name.bytes().chain([0xff]).chain(key.bytes());
    let fnv = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mixed = (fnv ^ (fnv >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shards(names: &[&'static str]) -> Shards<&'static str> {
        Shards::new(names.iter().map(|it| (*it, *it))).unwrap()
    }

    #[test]
    fn the_hash_stays_the_same_between_versions() {
        assert_eq!(hash("", ""), 0x1bbd_5c81_3c69_a8d7);
        assert_eq!(hash("north", "order:42"), 0xfca1_ba55_e7f7_c1e4);
    }

    #[test]
    fn every_shard_gets_an_equal_part_whatever_the_order_of_the_names() {
        let (one, other) = (shards(&["a", "b", "c", "d"]), shards(&["d", "b", "a", "c"]));
        let mut parts = std::collections::HashMap::new();
        for key in (0..40_000).map(|it| format!("order:{it}")) {
            assert_eq!(one.of(&key), other.of(&key));
            *parts.entry(*one.of(&key)).or_insert(0) += 1;
        }
        assert!(parts.len() == 4 && parts.values().all(|it| (9_500..10_500).contains(it)), "{parts:?}");
    }

    #[test]
    fn a_new_shard_takes_its_part_from_all_and_moves_no_other_key() {
        let (before, after) = (shards(&["a", "b", "c", "d"]), shards(&["a", "b", "c", "d", "e"]));
        let keys: Vec<_> = (0..40_000).map(|it| format!("user:{it}")).collect();
        let moved: Vec<_> = keys.iter().filter(|it| before.of(it) != after.of(it)).collect();
        assert!(moved.iter().all(|it| *after.of(it) == "e"));
        assert!((7_500..8_500).contains(&moved.len()), "{}", moved.len());
    }

    #[test]
    fn what_cannot_divide_keys_is_refused() {
        for bad in [&[][..], &["a", "b", "a"], &["a", ""]] {
            let err = Shards::new(bad.iter().map(|it| (*it, ()))).unwrap_err();
            assert!(matches!(err, Error::InvalidOption { option: "shards", .. }), "{err}");
        }
    }
}
