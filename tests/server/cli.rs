//! What cannot be started is refused with a reason, and never with a panic.

use std::net::TcpListener;
use std::process::Output;

use crate::common::binary;

fn run(arguments: &[&str]) -> (i32, String) {
    let Output { status, stderr, stdout } = binary().args(arguments).output().unwrap();
    assert!(stdout.is_empty());
    let text = String::from_utf8(stderr).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    (status.code().unwrap(), text)
}

#[test]
fn every_fault_of_a_configuration_is_told_with_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("halfopen.toml");
    std::fs::write(
        &file,
        "[server]\nlisten = \"somewhere\"\ntypo = 1\n[memory]\nlimit = \"1XB\"\n[stores.gone]\nurl = \"file:///does/not/exist\"\n\
         [stores.other]\nurl = \"ftp://host\"\n",
    )
    .unwrap();
    let (code, text) = run(&[
        "serve",
        "--config",
        file.to_str().unwrap(),
        "--store",
        "nonsense",
        "--store",
        "b=s3://bucket",
        "--store-option",
        "b.aws_colour=red",
        "--store-option",
        "secret",
        "--freshness",
        "b=soon",
    ]);
    assert_eq!(code, 78, "{text}");
    for key in [
        "server.listen",
        "server.typo",
        "memory.limit",
        "stores.gone.url",
        "stores.other.url",
        "--store",
        "--store-option",
        "stores.b.freshness",
    ] {
        assert!(text.lines().any(|line| line.starts_with(&format!("halfopen: {key}: "))), "{key} in:\n{text}");
    }
}

#[test]
fn bad_stores_are_refused() {
    for (arguments, reason) in [
        (vec!["--store", "a=s3://"], "bucket"),
        (vec!["--store", "a=not a url"], "not a URL"),
        (vec!["--store", "a=file://other/dir"], "not a path"),
        (vec!["--store", "a=s3://b", "--store-option", "a.aws_colour=red"], "aws_colour"),
        (vec!["--store", "a=s3://b", "--store-option", "a.aws_timeout=3s"], "is not used"),
        (vec!["--store", "a=s3://b", "--store-option", "a.aws_allow_http=maybe"], "true or false"),
        (vec!["--store", "a=memory://", "--store-option", "a.x=y"], "not an option"),
        (vec!["--store", "a b=memory://"], "letters, digits"),
        (vec!["--store-option", "a.x=y"], "stores.a.url: is missing"),
        (vec!["--freshness", "a=1h"], "stores.a.url: is missing"),
    ] {
        let (code, text) = run(&[vec!["serve"], arguments.clone()].concat());
        assert!(code == 78 && text.contains(reason), "{arguments:?}: {code}: {text}");
    }
}

#[test]
fn a_limit_that_is_too_small_prints_the_sum() {
    let (code, text) = run(&["serve", "--memory-limit", "40MiB"]);
    assert!(code == 78 && text.contains("baseline") && text.contains("raise the limit by"), "{text}");
}

#[test]
fn flags_that_do_not_exist_are_usage() {
    for arguments in [vec!["serve", "--colour"], vec!["sing"], vec!["serve", "--listen"]] {
        assert_eq!(run(&arguments).0, 64, "{arguments:?}");
    }
    let help = binary().args(["serve", "--help"]).output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(
        help.status.success() && text.contains("--memory-limit") && text.contains("HALFOPEN_MEMORY_LIMIT"),
        "{text}"
    );
    assert!(binary().arg("--version").output().unwrap().status.success());
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, text) = run(&["serve", "--listen", &address, "--admin-listen", "127.0.0.1:0"]);
    assert!(code == 1 && text.contains("server.listen") && text.contains(&address), "{code}: {text}");
    let (code, text) = run(&["serve", "--listen", "127.0.0.1:0", "--admin-listen", &address]);
    assert!(code == 1 && text.contains("server.admin_listen"), "{code}: {text}");
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("halfopen.toml");
    std::fs::write(&file, "[memory]\nlimit = \"from the file\"\n").unwrap();
    let limit_of = |environment: Option<&str>, flag: Option<&str>| {
        let mut command = binary();
        command.args(["serve", "--config", file.to_str().unwrap()]);
        if let Some(value) = environment {
            command.env("HALFOPEN_MEMORY_LIMIT", value);
        }
        if let Some(value) = flag {
            command.args(["--memory-limit", value]);
        }
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    assert!(limit_of(None, None).contains("`from the file`"));
    assert!(limit_of(Some("from env"), None).contains("`from env`"));
    assert!(limit_of(Some("from env"), Some("from flag")).contains("`from flag`"));
}
