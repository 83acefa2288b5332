//! The structure of the source, kept true.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Modules in the order of their dependencies: each may use those above it, and those of its own line.
const LAYERS: &[&[&str]] = &[
    &["range", "object", "error", "sync"],
    &["ledger", "buffer", "memory", "telemetry", "config", "heap"],
    &["flight", "store", "disk", "purge"],
    &["cache"],
    &["metadata", "governor"],
    &["fetch"],
    &["reader"],
    &["http"],
    &["server", "check"],
    &["main"],
];

/// Third-party crates and the module that each lives in.
const HOMES: &[(&str, &str)] = &[
    ("axum", "http server"),
    ("axum_server", "server"),
    ("backon", "fetch"),
    ("bytesize", "config memory check"),
    ("clap", "config heap"),
    ("foyer", "cache disk"),
    ("http_body_util", "store"),
    ("headers", "http"),
    ("http_range_header", "http"),
    ("httpdate", "http"),
    ("humantime", "config"),
    ("jemalloc_pprof", "heap"),
    ("mappings", "heap"),
    ("object_store", "store"),
    ("percent_encoding", "http"),
    ("pprof_util", "heap"),
    ("procfs", "memory heap"),
    ("prometheus_client", "telemetry"),
    ("hyper", "store"),
    ("hyper_rustls", "store"),
    ("hyper_util", "store"),
    ("rustix", "disk"),
    ("rustls", "store"),
    ("tikv_jemalloc_ctl", "memory"),
    ("tikv_jemalloc_sys", "buffer"),
    ("tikv_jemallocator", "main"),
    ("tokio_io_timeout", "server"),
    ("toml", "config"),
    ("tracing_subscriber", "telemetry"),
];

/// Every source file, with the module at its root, and its production code.
fn sources() -> Vec<(PathBuf, String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut pending = vec![root.clone()];
    let mut sources = Vec::new();
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pending.push(path);
                continue;
            }
            let relative = path.strip_prefix(&root).unwrap().with_extension("");
            let module = relative.iter().next().unwrap().to_str().unwrap().to_owned();
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap().to_owned();
            if !path.ends_with("tests.rs") && module != "lib" {
                sources.push((relative, module, code));
            }
        }
    }
    assert!(sources.len() > 20);
    sources
}

/// The code without comments.
fn code_lines(code: &str) -> impl Iterator<Item = &str> {
    code.lines().map(|line| line.split("//").next().unwrap())
}

#[test]
fn inclusive_ranges_live_in_one_file() {
    for (path, _, code) in sources() {
        if path == Path::new("http/headers") {
            continue;
        }
        for line in code_lines(&code) {
            for inclusive in ["RangeInclusive", "..=", "\"bytes=", ".last()"] {
                assert!(!line.contains(inclusive), "{inclusive} in {}: {line}", path.display());
            }
        }
    }
    let (_, _, range) = sources().into_iter().find(|(path, ..)| path == Path::new("range")).unwrap();
    assert_eq!(code_lines(&range).filter(|line| line.contains("_sub(1)")).count(), 1, "one place subtracts one");
}

#[test]
fn nothing_is_used_upwards() {
    let layer_of: BTreeMap<&str, usize> = LAYERS
        .iter()
        .enumerate()
        .flat_map(|(layer, modules)| modules.iter().map(move |module| (*module, layer)))
        .collect();
    for (path, module, code) in sources() {
        let own = *layer_of.get(module.as_str()).unwrap_or_else(|| panic!("{module} is in no layer"));
        for line in code_lines(&code) {
            for used in line.split("crate::").skip(1) {
                let used: String = used.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                let layer = *layer_of.get(used.as_str()).unwrap_or_else(|| panic!("{used} is in no layer: {line}"));
                assert!(layer <= own, "{} uses crate::{used}, which lies above it", path.display());
            }
        }
    }
}

#[test]
fn every_crate_has_one_home() {
    for (path, module, code) in sources() {
        for line in code_lines(&code) {
            for (name, homes) in HOMES {
                let used = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == *name);
                let used = used && line.contains(&format!("{name}::"));
                assert!(!used || homes.split(' ').any(|home| home == module), "{name} in {}: {line}", path.display());
            }
        }
    }
}

#[test]
fn unsafe_code_is_in_two_files() {
    for (path, _, code) in sources() {
        let allowed = [Path::new("buffer/arena"), Path::new("main")].contains(&path.as_path());
        assert!(allowed || !code_lines(&code).any(|line| line.contains("unsafe")), "unsafe in {}", path.display());
    }
}
