//! The proof of one acquisition.

#[cfg(feature = "testing")]
use std::cell::Cell;
use std::fmt;

#[cfg(feature = "testing")]
thread_local! {
    static IS_SIMULATED: Cell<bool> = const { Cell::new(false) };
}

/// From now on, the tokens of this thread come from `fastrand`, which a simulation seeds.
#[cfg(feature = "testing")]
pub fn simulate_tokens() {
    IS_SIMULATED.set(true);
}

/// 128 random bits, new for every acquisition. Every statement uses them as proof of ownership.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; 16]);

impl Token {
    /// The greatest token.
    pub(crate) const LAST: Self = Self([u8::MAX; 16]);

    /// A new token. No other acquisition has it.
    pub fn random() -> Self {
        #[cfg(feature = "testing")]
        if IS_SIMULATED.get() {
            return Self(fastrand::u128(..).to_be_bytes());
        }
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the operating system's random numbers are always there");
        Self(bytes)
    }

    /// The token with the bytes that a store has kept.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// A token without an owner, for a key that stays taken after its release: eight zero bytes, then random ones. They
    /// need no entropy of the operating system: the token proves nothing.
    pub fn nobody() -> Self {
        Self(u128::from(fastrand::u64(..)).to_be_bytes())
    }

    /// Whether this is a token without an owner.
    pub fn is_nobody(&self) -> bool {
        self.0[..8] == [0; 8]
    }

    /// The bytes of the token, for the store to keep.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The token as 32 lowercase hexadecimal digits, for a store that keeps text.
    ///
    /// ```
    /// use lockkit::store::Token;
    ///
    /// let token = Token::from_bytes(*b"0123456789abcdef");
    /// assert_eq!(token.to_hex(), "30313233343536373839616263646566");
    /// assert_eq!(Token::from_hex(&token.to_hex()), Some(token));
    /// assert_eq!(Token::from_hex("30"), None);
    /// ```
    pub fn to_hex(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }

    /// The token with these 32 hexadecimal digits. `None` for any other text.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let is_token = hex.len() == 32 && hex.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_token.then(|| u128::from_str_radix(hex, 16).ok()).flatten().map(|bits| Self(bits.to_be_bytes()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}
