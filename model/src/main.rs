//! Prints what the models find: the tables of `README.md`, or the run of a bug by its name.

use lockkit_model::{
    check::{run_of, tables},
    guard::Guard,
    quorum::Quorum,
    sessions::Sessions,
    stops::Stops,
    table::Table,
};

fn main() {
    let Some(name) = std::env::args().nth(1) else {
        println!("## Leases in a table\n\n{}", tables::<Table>());
        println!("## The fence guard\n\n{}", tables::<Guard>());
        println!("## A quorum of Redis servers\n\n{}", tables::<Quorum>());
        println!("## Sessions of ZooKeeper\n\n{}", tables::<Sessions>());
        print!("## A process of ZooKeeper that is stopped\n\n{}", tables::<Stops>());
        return;
    };
    let run = run_of::<Table>(&name)
        .or_else(|| run_of::<Guard>(&name))
        .or_else(|| run_of::<Quorum>(&name))
        .or_else(|| run_of::<Sessions>(&name))
        .or_else(|| run_of::<Stops>(&name));
    match run {
        Some(run) => print!("{run}"),
        None => println!("no bug is named `{name}`"),
    }
}
