use lockkit::with_lock;

#[derive(Debug)]
struct MyError;

impl From<lockkit::Error> for MyError {
    fn from(_: lockkit::Error) -> Self {
        Self
    }
}

#[with_lock(version, attempts = 3)]
async fn f() -> Result<u8, MyError> {
    Err(MyError)
}

fn main() {}
