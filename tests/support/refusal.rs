use lockkit::{Error, Result};

/// The refusal of a request for a held lease, with its holder. The look for the holder has 50 ms, which a busy machine
/// may not keep, so the request is repeated.
///
/// # Panics
/// If the request is granted.
pub async fn refusal<T>(request: impl AsyncFn() -> Result<T>) -> Error {
    loop {
        let Err(refused) = request().await else { panic!("nobody holds the lease") };
        if !matches!(refused, Error::Contended { holder: None, .. }) {
            return refused;
        }
    }
}
