use lockkit::with_lock;

#[derive(Debug, thiserror::Error)]
#[error("status")]
struct Status;

fn of_another(_: std::io::Error) -> Status {
    Status
}

#[with_lock(version, attempts = 3, map_err = of_another)]
async fn f() -> Result<(), Status> {
    Ok(())
}

fn main() {}
