//! The names of the children of a key, as the two other clients write them.

use lockkit::store::Token;

/// Whose names the children of a key get. A lease excludes the locks of clients with the same layout only.
///
/// The store reads the names of both layouts, so its leases wait for the locks of both. Neither Curator nor kazoo
/// reads the other's names, unless kazoo is told to with `extra_lock_patterns=["-lock-"]`. All processes that use a
/// key, with lockkit or another client, should use one layout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// `_c_<uuid>-lock-0000000000`, as the `InterProcessMutex` of Curator. The default.
    #[default]
    Curator,
    /// `<32 hexadecimal digits>__lock__0000000000`, as the `Lock` of kazoo.
    ///
    /// A `Lock` of kazoo creates the node of its key once, and fails with `NoNodeError` if the sweep of lockkit has
    /// deleted it since. Use [`sweep_every(None)`](lockkit::lease::LeasesBuilder::sweep_every), or a new `Lock` after a
    /// week without use.
    Kazoo,
}

impl Layout {
    /// The name of a claim's child up to the number, which the server adds.
    pub(crate) fn prefix(self, token: Token) -> String {
        let hex = token.to_hex();
        match self {
            Self::Curator => {
                let id = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
                format!("_c_{id}-lock-")
            }
            Self::Kazoo => format!("{hex}__lock__"),
        }
    }
}

/// A child of a key that has a place in the queue of its claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) name: String,
    pub(crate) number: u64,
}

impl Place {
    /// The place of the child with this name. `None` for a child that does not compete for the lock.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let (front, digits) = name.split_at_checked(name.len().checked_sub(10)?)?;
        // Curator sorts by what follows `lock-`, kazoo by the ten digits after `__lock__`.
        let competes = front.ends_with("lock-") || front.ends_with("__lock__");
        let is_number = digits.bytes().all(|it| it.is_ascii_digit());
        let number = digits.parse().ok().filter(|_| competes && is_number)?;
        Some(Self { name: name.to_owned(), number })
    }

    /// The unique id in the name, which is the token of a claim of lockkit.
    pub(crate) fn token(&self) -> Option<Token> {
        let front = &self.name[..self.name.len() - 10];
        let id = match front.strip_prefix("_c_") {
            Some(rest) => rest.strip_suffix("-lock-")?.replace('-', ""),
            None => front.strip_suffix("__lock__")?.to_owned(),
        };
        Token::from_hex(&id)
    }
}

/// The places among these children, the first in the queue first.
pub(crate) fn queue(children: &[String]) -> Vec<Place> {
    let mut places: Vec<_> = children.iter().filter_map(|it| Place::of(it)).collect();
    places.sort_unstable_by_key(|it| it.number);
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_are_read_and_lead_back_to_the_token() {
        let token = Token::from_bytes(*b"0123456789abcdef");
        let [curator, kazoo] = [Layout::Curator, Layout::Kazoo].map(|it| it.prefix(token));
        assert_eq!(curator, "_c_30313233-3435-3637-3839-616263646566-lock-");
        assert_eq!(kazoo, "30313233343536373839616263646566__lock__");
        for prefix in [curator, kazoo] {
            let place = Place::of(&format!("{prefix}0000000042")).expect("a place");
            assert_eq!((place.number, place.token()), (42, Some(token)));
        }
    }

    #[test]
    fn other_children_have_no_place() {
        for name in
            ["0000000001", "x-lock-", "_c_1-__READ__0000000001", "abc__rlock__0000000001", "é-lock-00000000é1", ""]
        {
            assert_eq!(Place::of(name), None, "{name}");
        }
        let foreign = Place::of("lock-0000000007").expect("the recipe of ZooKeeper's manual");
        assert_eq!((foreign.number, foreign.token()), (7, None));
    }

    #[test]
    fn the_queue_is_in_the_order_of_the_numbers_and_not_of_the_names() {
        let names = ["ff__lock__0000000001", "_c_a-lock-0000000010", "00__lock__0000000009", "other"];
        let numbers: Vec<_> = queue(&names.map(str::to_owned)).iter().map(|it| it.number).collect();
        assert_eq!(numbers, [1, 9, 10]);
    }
}
