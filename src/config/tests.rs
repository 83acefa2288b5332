use super::*;

const MACHINE: Machine = Machine { cgroup_limit: None, ram: 16 << 30, cores: 2 };

fn resolve(toml: &str) -> Result<Config, Vec<String>> {
    let mut faults = Vec::new();
    let settings = Settings::from_toml(toml, &mut faults);
    Config::resolve(settings, faults, &MACHINE)
        .map_err(|rejected| rejected.faults.iter().map(ToString::to_string).collect())
}

#[test]
fn nothing_written_is_a_valid_configuration() {
    let config = resolve("").unwrap();
    assert_eq!(config.memory.limit, 4 << 30);
    assert_eq!(config.memory.limit_source, LimitSource::Ram);
    assert_eq!(config.fetch.extent_max.get(), 1 << 20);
    assert_eq!(config.effective["server.listen"], "127.0.0.1:8080");
}

#[test]
fn the_cgroup_counts_when_it_is_smaller_than_ram() {
    let resolve = |cgroup| {
        let machine = Machine { cgroup_limit: Some(cgroup), ..MACHINE };
        let memory = Config::resolve(Settings::default(), Vec::new(), &machine).unwrap().memory;
        (memory.limit, memory.limit_source)
    };
    assert_eq!(resolve(1 << 30), (3 << 28, LimitSource::Cgroup));
    assert_eq!(resolve(1 << 40), (4 << 30, LimitSource::Ram));
}

#[test]
fn the_kernels_share_fits_beside_a_derived_limit() {
    let cgroup = 1 << 30;
    let machine = Machine { cgroup_limit: Some(cgroup), ..MACHINE };
    let config = "[server]\nconnections_max = 12000\nheader_bytes_max = \"8KiB\"\n";
    let mut faults = Vec::new();
    let settings = Settings::from_toml(config, &mut faults);
    let memory = Config::resolve(settings, faults, &machine).unwrap().memory;
    assert!(memory.limit < cgroup / 4 * 3, "{}", memory.limit);
    assert!(memory.limit + memory.budget.kernel_bytes <= cgroup);
}

#[test]
fn every_fault_is_told_at_once_with_its_key() {
    let faults = resolve(
        r#"
        typo = 1
        [server]
        listen = "nowhere"
        drain_timeout = 30
        lisen = "127.0.0.1:1"
        [memory]
        limit = "lots"
        [fetch]
        retries = -1
        stall_timeout = "90000h"
        [stores.a]
        url = "not a url"
        freshness = "sometimes"
        color = "red"
        [stores.b]
        [stores."c/d"]
        url = "memory://"
        [stores.e]
        url = "https://user:secret@host/"
        [stores.f]
        url = "s3://bucket?sig=secret"
        "#,
    )
    .unwrap_err();
    for key in [
        "typo",
        "server.listen",
        "server.drain_timeout",
        "server.lisen",
        "memory.limit",
        "fetch.retries",
        "fetch.stall_timeout",
        "stores.a.url",
        "stores.a.freshness",
        "stores.a.color",
        "stores.b.url",
        "stores.c/d",
        "stores.e.url",
        "stores.f.url",
    ] {
        assert_eq!(
            faults.iter().filter(|fault| fault.starts_with(&format!("{key}: "))).count(),
            1,
            "{key} in {faults:#?}"
        );
    }
    assert_eq!(faults.len(), 14, "{faults:#?}");
    assert!(!faults.iter().any(|fault| fault.contains("secret")), "{faults:#?}");
}

#[test]
fn a_file_that_is_not_toml_is_told_with_its_line() {
    let faults = resolve("[server\nlisten = 1").unwrap_err();
    assert!(faults[0].starts_with("--config: not TOML") && faults[0].contains("line 1"), "{faults:?}");
}

#[test]
fn a_limit_that_is_too_small_prints_the_sum() {
    let faults = resolve("[memory]\nlimit = \"32MiB\"").unwrap_err();
    assert!(faults[0].contains("baseline") && faults[0].contains("raise the limit by"), "{faults:?}");
}

#[test]
fn secrets_are_not_shown() {
    let config =
        resolve("[stores.a]\nurl = \"https://host/\"\noptions = { aws_secret_access_key = \"secret\" }").unwrap();
    assert_eq!(config.effective["stores.a.options.aws_secret_access_key"], HIDDEN_TEXT);
    assert!(!format!("{config:?}").contains("secret\""));
    assert!(!config.effective.values().any(|value| value.contains("secret")));
}

const HIDDEN_TEXT: &str = "***";
