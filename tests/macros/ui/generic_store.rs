use lockkit::{Error, Leases, with_lock};

#[with_lock(lease, on = leases, key = "k")]
async fn f<S>(leases: &Leases<S>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
