//! The program that keeps one throwaway server running for as long as there are test processes.

use std::env;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let [name, state] = args.as_slice() else {
        eprintln!(
            "usage: test-servers postgres|mariadb|mysql|galera|group STATE-FOLDER; the tests start it themselves"
        );
        return ExitCode::FAILURE;
    };
    if let Err(err) = support::throwaway::supervise(name, Path::new(state)) {
        eprintln!("{err}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
