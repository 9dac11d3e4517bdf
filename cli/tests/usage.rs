//! What needs no server: how commands end, what they print, and where messages go. What they do on every database and
//! store is tested in `tests/cli`.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    thread::sleep,
    time::Duration,
};

use tempfile::{TempDir, tempdir};

/// `lockkit` in an empty folder, without a database in its environment.
fn lockkit(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockkit"));
    command.args(arguments).current_dir(folder).env_remove("DATABASE_URL");
    command
}

/// A folder with a database that has lockkit's tables, named in `.env`.
fn migrated() -> TempDir {
    let folder = tempdir().expect("make a folder");
    fs::write(folder.path().join(".env"), "DATABASE_URL=sqlite://locks.db?mode=rwc\n").expect("write .env");
    assert_eq!(ends(lockkit(folder.path(), &["migrate"])).0, 0);
    folder
}

/// The exit code, and what was written to stdout and stderr.
fn ends(mut command: Command) -> (i32, String, String) {
    ends_writing(&mut command)
}

/// The same, where stdout may be something else.
fn ends_writing(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("run lockkit");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("no signal ended it"), text(stdout), text(stderr))
}

#[test]
fn the_exit_code_is_that_of_the_command_or_says_why_there_is_none() {
    let folder = migrated();
    let run = |arguments: &[&str]| ends(lockkit(folder.path(), &[&["run", "nightly", "--"], arguments].concat()));
    assert_eq!(run(&["true"]), (0, String::new(), String::new()));
    assert_eq!(run(&["sh", "-c", "exit 3"]).0, 3);
    assert_eq!(run(&["sh", "-c", "kill -USR1 $$"]).0, 128 + 10);
    let (code, _, said) = run(&["no-such-command"]);
    assert_eq!((code, said.contains("cannot run `no-such-command`: No such file")), (127, true), "{said}");
    fs::write(folder.path().join("text"), "no program").expect("write a file");
    let (code, _, said) = run(&["./text"]);
    assert_eq!((code, said.contains("cannot run `./text`: Permission denied")), (126, true), "{said}");
}

#[test]
fn a_wrong_command_line_ends_with_64_and_says_what_to_write() {
    let folder = tempdir().unwrap();
    for (arguments, expected) in [
        (&["ls"][..], "give --url, or set DATABASE_URL"),
        (&["ls", "--url", "oracle://db"], "`oracle` is no database"),
        (&["ls", "--store", "memcached://m"], "`memcached` is no store"),
        (&["migrate", "--store", "etcd://e"], "name a database by --url"),
        (&["web", "--url", "sqlite::memory:", "--bind", "0.0.0.0:0"], "bind 127.0.0.1"),
        (&["run", "nightly"], "<COMMAND>"),
        (&["run", "nightly", "--ttl", "3s", "--grace", "1100ms", "--", "true"], "--grace must be at most a third"),
        (&["run", "nightly", "--wait", "soon", "--", "true"], "soon"),
        (&["steal", "nightly", "--yes"], "--fence"),
        (&["ls", "--url", "sqlite://x.db?mode=rwc", "--ttl"], "--ttl"),
    ] {
        let (code, stdout, stderr) = ends(lockkit(folder.path(), arguments));
        assert_eq!((code, &*stdout), (64, ""), "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_broken_file_of_variables_is_named_with_the_line_and_without_its_text() {
    let folder = tempdir().unwrap();
    let ls = |text: &str, arguments: &[&str]| {
        fs::write(folder.path().join(".env"), text).expect("write .env");
        ends(lockkit(folder.path(), arguments))
    };
    for (text, expected) in [
        ("A=1\n\nDATABASE_URL=sqlite://s3cret word.db # no\n", "line 3 is not NAME=value, or its value needs quotes"),
        ("DATABASE_URL\nDATABASE_URL s3cret\n", "line 1 is not NAME=value"),
        ("# A=\nB=1 # no\nDATABASE_URL='sqlite://s3cret.db\nC=2\n", "line 3 opens a quote that is not closed"),
    ] {
        let (code, _, said) = ls(text, &["ls"]);
        assert_eq!(code, 64, "{said}");
        let path = folder.path().join(".env");
        assert!(said.contains(&format!("no database is named, and {}: {expected}", path.display())), "{said}");
        assert!(!said.contains("s3cret"), "{said}");
    }
    let (code, _, said) = ls("DATABASE_URL", &["migrate", "--url", "sqlite://x.db?mode=rwc"]);
    assert_eq!((code, &*said), (0, "lockkit: the tables are there\n"), "a database is named");
}

#[test]
fn a_name_that_is_no_key_is_refused_before_anything_happens() {
    let folder = migrated();
    let long = "x".repeat(10_000);
    for name in ["", "two\nlines", &long] {
        let (code, _, said) = ends(lockkit(folder.path(), &["run", name, "--", "touch", "ran"]));
        assert_eq!(code, 64, "{said}");
        assert!(!folder.path().join("ran").exists());
    }
}

#[test]
fn what_is_missing_has_exit_codes_of_its_own() {
    let folder = tempdir().unwrap();
    let (code, _, said) = ends(lockkit(folder.path(), &["ls", "--url", "sqlite://x.db?mode=rwc"]));
    assert_eq!(code, 78);
    assert!(said.contains("`lockkit migrate`") && !said.contains("await"), "{said}");
    let (code, _, said) = ends(lockkit(folder.path(), &["ls", "--url", "sqlite://no/such/folder.db"]));
    assert_eq!((code, said.contains("the database cannot be reached")), (69, true), "{said}");
}

#[test]
fn a_message_names_the_cause_once_and_shows_no_password() {
    let folder = tempdir().unwrap();
    for (store, url, cause) in [
        ("--url", "postgres://app:s%33cret@127.0.0.1:1/shop", "Connection refused"),
        ("--url", "mysql://app:s%33cret@127.0.0.1:1/shop", "Connection refused"),
        ("--url", "postgres://app:s3cret@127.0.0.1:port/shop", "invalid port number"),
        ("--url", "oracle://app:s3cret@db", "`oracle` is no database"),
        ("--url", "sqlite://no/such/folder.db", "unable to open database file"),
        ("--store", "redis://app:s%33cret@127.0.0.1:1", "Connection refused"),
        ("--store", "redis://app:s3cret@127.0.0.1:port", "Redis URL did not parse"),
        ("--store", "etcd://app:s3cret@127.0.0.1:1", "Connection refused"),
        ("--store", "zookeeper://app:s3cret@127.0.0.1:port", "cannot be reached"),
    ] {
        let (code, _, said) = ends(lockkit(folder.path(), &["ls", store, url]));
        assert!(code != 0 && said.matches(cause).count() == 1, "{url}: {said}");
        assert!(!said.contains("s3cret") && !said.contains("s%33cret"), "{url}: {said}");
    }
}

#[test]
fn leases_are_listed_as_a_table_and_as_json() {
    let folder = migrated();
    let name = "a \"quoted\" <script>";
    let script = "\"$LOCKKIT\" ls; \"$LOCKKIT\" ls --json; \"$LOCKKIT\" show \"$LOCKKIT_KEY\" --json";
    let mut run = lockkit(folder.path(), &["run", name, "--holder", "me", "--", "sh", "-c", script]);
    run.env("LOCKKIT", env!("CARGO_BIN_EXE_lockkit"));
    let (code, listed, said) = ends(run);
    assert_eq!(code, 0, "{said}");
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(lines.len(), 4, "{listed}");
    assert_eq!(
        lines[0].split_whitespace().collect::<Vec<_>>(),
        ["KEY", "HOLDER", "FENCE", "HELD", "LEFT", "RENEWED", "STATE"]
    );
    assert!(lines[1].contains(name), "{listed}");
    for line in &lines[2..] {
        let lease: serde_json::Value = serde_json::from_str(line).expect(line);
        assert_eq!((lease["key"].as_str(), lease["holder"].as_str()), (Some(name), Some("me")));
        assert!(lease["expires_in_ms"].as_u64() <= Some(30_000) && lease["fence"].as_u64() > Some(0));
    }
    assert_eq!(
        ends(lockkit(folder.path(), &["ls"])),
        (0, String::new(), String::new()),
        "none is left, and no heading"
    );
}

#[test]
fn stealing_needs_the_fence_or_a_person() {
    let folder = migrated();
    let script = r#"
        "$LOCKKIT" steal nightly </dev/null; echo $?
        "$LOCKKIT" steal nightly --yes --fence 1; echo $?
        "$LOCKKIT" check nightly --fence 1; echo $?
        "$LOCKKIT" check nightly --fence $LOCKKIT_FENCE; echo $?
        "$LOCKKIT" steal nightly --yes --fence $LOCKKIT_FENCE; echo $?
        "$LOCKKIT" check nightly --fence $LOCKKIT_FENCE; echo $?
        "$LOCKKIT" steal nightly --yes --fence $LOCKKIT_FENCE; echo $?
    "#;
    let mut run = lockkit(folder.path(), &["run", "nightly", "--", "sh", "-c", script]);
    run.env("LOCKKIT", env!("CARGO_BIN_EXE_lockkit"));
    let (code, codes, said) = ends(run);
    assert_eq!(codes, "1\n79\n79\n0\n0\n79\n79\n", "{said}");
    assert!(said.contains("nobody is there to be asked: give --yes --fence"), "{said}");
    assert_eq!(code, 79, "the command was successful and its lease was not: {said}");
}

#[test]
fn a_lease_is_taken_if_its_holder_is_dead_and_not_from_one_that_lives() {
    let folder = migrated();
    let if_dead = || ends(lockkit(folder.path(), &["steal", "nightly", "--if-dead"]));
    let mut run = lockkit(folder.path(), &["run", "nightly", "--ttl", "2s", "--grace", "100ms", "--", "sh", "-c"]);
    let mut run = run.args(["touch held; exec sleep 600"]).spawn().expect("start");
    while !folder.path().join("held").exists() {
        sleep(Duration::from_millis(10));
    }
    let (code, _, said) = if_dead();
    assert_eq!((code, said.contains("nothing was taken")), (75, true), "{said}");
    run.kill().expect("kill lockkit");
    let (code, _, said) = if_dead();
    assert_eq!((code, said.contains("did not renew it")), (0, true), "{said}");
    assert_eq!(if_dead().0, 0, "it is free");
    run.wait().expect("wait");
}

#[test]
fn what_a_command_leaves_running_is_ended_and_named() {
    let folder = migrated();
    let script = "(trap '' TERM; while :; do sleep 0.01; done) & sleep 60 & exit 5";
    let (code, _, said) =
        ends(lockkit(folder.path(), &["run", "nightly", "--grace", "0.2s", "--", "sh", "-c", script]));
    assert_eq!(code, 5);
    assert!(said.contains("has left processes running") && said.contains("sleep"), "{said}");
}

#[test]
fn a_daemon_that_a_command_starts_does_not_keep_the_lease() {
    let folder = migrated();
    // It leaves the group with all that it has inherited.
    let script = "setsid sh -c 'echo $$ >pid; exec sleep 60' >/dev/null 2>&1 & until [ -s pid ]; do sleep 0.01; done";
    assert_eq!(ends(lockkit(folder.path(), &["run", "nightly", "--", "sh", "-c", script])).0, 0);
    assert_eq!(ends(lockkit(folder.path(), &["ls"])), (0, String::new(), String::new()));
    let pid = fs::read_to_string(folder.path().join("pid")).expect("it has started");
    assert!(Command::new("kill").arg(pid.trim()).status().expect("run kill").success(), "it lives");
}

#[test]
fn migrations_are_written_without_a_connection() {
    let folder = tempdir().unwrap();
    let arguments = ["migrate", "--url", "postgres://nobody@127.0.0.1:1/none", "--print", "sql"];
    assert_eq!(ends(lockkit(folder.path(), &arguments)), (0, "sql\n".to_owned(), String::new()));
    assert!(folder.path().join("sql/0001_lockkit.sql").exists());
}

#[test]
fn completions_and_manual_pages_name_the_commands() {
    let folder = tempdir().unwrap();
    let (code, completions, _) = ends(lockkit(folder.path(), &["completions", "bash"]));
    assert!(code == 0 && completions.contains("--at-least"), "{completions}");
    assert_eq!(ends(lockkit(folder.path(), &["man", "pages"])).0, 0);
    let page = fs::read_to_string(folder.path().join("pages/lockkit-run.1")).expect("the page of `run`");
    assert!(page.contains("LOCKKIT_GUARD"), "{page}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error_and_a_full_disk_is_one() {
    let folder = migrated();
    for arguments in [&["doctor"][..], &["ls", "--json"], &["explain", "--json"]] {
        let mut run =
            lockkit(folder.path(), &[&["run", "nightly", "--", env!("CARGO_BIN_EXE_lockkit")], arguments].concat());
        let mut run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start");
        drop(run.stdout.take());
        let ended = run.wait_with_output().expect("wait");
        let said = String::from_utf8(ended.stderr).expect("UTF-8");
        assert!(ended.status.success() && !said.contains("panicked"), "{arguments:?}: {said}");
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("open /dev/full");
        let mut run =
            lockkit(folder.path(), &[&["run", "nightly", "--", env!("CARGO_BIN_EXE_lockkit")], arguments].concat());
        let (code, _, said) = ends_writing(run.stdout(full));
        assert_eq!((code, said.contains("cannot write to stdout")), (1, true), "{arguments:?}: {said}");
    }
}
