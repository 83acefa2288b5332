//! The command line, and the environment variables that stand for its flags.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use toml::Value;

use super::keys;
use super::settings::{Fault, Settings, Source};
use crate::heap::Format;

/// A cache of exact byte ranges in front of an object store, whose resident memory stays under one limit.
#[derive(Parser, Debug)]
#[command(name = "halfopen", version)]
pub struct Cli {
    /// What to do; without it: serve.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the server.
    Serve(Box<ServeFlags>),
    /// Read the configuration, reach every store, print the limits and the memory sum; exit 0, or 78 when something is wrong.
    Check(Box<ServeFlags>),
    /// Turn a raw heap profile (standard input) into one with names: what the server runs for /debug/heap.
    #[command(hide = true)]
    HeapProfile {
        /// Into what.
        format: Format,
    },
}

/// Flags of `serve`. Their values are checked together with those of the file, so that all faults are told at once.
#[derive(Args, Debug, Default)]
pub struct ServeFlags {
    /// Configuration file (TOML); see docs/configuration.md for its keys.
    #[arg(long, env = "HALFOPEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address of the data API [default: 127.0.0.1:8080].
    #[arg(long, env = "HALFOPEN_LISTEN", value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Address of the admin API [default: 127.0.0.1:9090].
    #[arg(long, env = "HALFOPEN_ADMIN_LISTEN", value_name = "ADDRESS")]
    pub admin_listen: Option<String>,
    /// Limit for the resident memory of the whole process [default: 75 % of the cgroup's limit, else 25 % of RAM].
    #[arg(long, env = "HALFOPEN_MEMORY_LIMIT", value_name = "SIZE")]
    pub memory_limit: Option<String>,
    /// Directory of the disk tier; needs --disk-capacity too [default: no disk tier].
    #[arg(long, env = "HALFOPEN_DISK_PATH", value_name = "DIR")]
    pub disk_path: Option<String>,
    /// Bytes that the disk tier may take; reserved at start.
    #[arg(long, env = "HALFOPEN_DISK_CAPACITY", value_name = "SIZE")]
    pub disk_capacity: Option<String>,
    /// A store to serve under /NAME/: <s3://bucket/prefix>, https://, <file:///dir> or memory://. May be repeated.
    #[arg(long, env = "HALFOPEN_STORE", value_name = "NAME=URL")]
    pub store: Vec<String>,
    /// An option of a store, in `object_store`'s names: `NAME.aws_endpoint=http`://... May be repeated.
    #[arg(long, env = "HALFOPEN_STORE_OPTION", value_name = "NAME.KEY=VALUE")]
    pub store_option: Vec<String>,
    /// How long a store's metadata is believed: immutable, a duration, or always; repeatable [default: 60s].
    #[arg(long, env = "HALFOPEN_FRESHNESS", value_name = "NAME=POLICY")]
    pub freshness: Vec<String>,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// Serve with these settings; faults found so far are kept with them.
    Serve(Settings, Vec<Fault>),
    /// Check these settings, likewise.
    Check(Settings, Vec<Fault>),
    /// See [`Command::HeapProfile`].
    HeapProfile(Format),
}

impl Invocation {
    /// Reads the arguments; clap itself ends the process for `--help` and for flags that do not exist.
    pub fn from_args() -> Result<Self, clap::Error> {
        let matches = Cli::command().try_get_matches()?;
        match Cli::from_arg_matches(&matches)?.command {
            Some(Command::HeapProfile { format }) => Ok(Self::HeapProfile(format)),
            Some(Command::Serve(flags)) => {
                let (settings, faults) = read(&flags, matches.subcommand_matches("serve"));
                Ok(Self::Serve(settings, faults))
            }
            Some(Command::Check(flags)) => {
                let (settings, faults) = read(&flags, matches.subcommand_matches("check"));
                Ok(Self::Check(settings, faults))
            }
            // No command is `serve` with what the environment says.
            None => {
                let matches = Cli::command().try_get_matches_from(["halfopen", "serve"])?;
                let matches = matches.subcommand_matches("serve");
                let flags = matches.map(ServeFlags::from_arg_matches).transpose()?.unwrap_or_default();
                let (settings, faults) = read(&flags, matches);
                Ok(Self::Serve(settings, faults))
            }
        }
    }
}

/// What the flags, the environment and the file say.
fn read(flags: &ServeFlags, matches: Option<&ArgMatches>) -> (Settings, Vec<Fault>) {
    let mut faults = Vec::new();
    let mut settings = match &flags.config {
        Some(path) => match std::fs::read_to_string(path) {
            Ok(text) => Settings::from_toml(&text, &mut faults),
            Err(error) => {
                faults.push(Fault::new("--config", format!("cannot read {}: {error}", path.display())));
                Settings::default()
            }
        },
        None => Settings::default(),
    };
    let source = |id| match matches.and_then(|matches| matches.value_source(id)) {
        Some(ValueSource::EnvVariable) => Source::Env,
        _ => Source::Flag,
    };
    for (id, key, value) in [
        ("listen", keys::LISTEN, &flags.listen),
        ("admin_listen", keys::ADMIN_LISTEN, &flags.admin_listen),
        ("memory_limit", keys::MEMORY_LIMIT, &flags.memory_limit),
        ("disk_path", keys::DISK_PATH, &flags.disk_path),
        ("disk_capacity", keys::DISK_CAPACITY, &flags.disk_capacity),
    ] {
        if let Some(value) = value {
            settings.set(key.name, Value::String(value.clone()), source(id));
        }
    }
    store_flags(flags, &mut settings, &mut faults, source);
    (settings, faults)
}

/// A flag is repeated; an environment variable holds several values between commas.
fn each(values: &[String], source: Source) -> impl Iterator<Item = &str> {
    let separator = (source == Source::Env).then_some(',');
    values.iter().flat_map(move |value| value.split(move |c| Some(c) == separator))
}

fn store_flags(
    flags: &ServeFlags,
    settings: &mut Settings,
    faults: &mut Vec<Fault>,
    source: impl Fn(&'static str) -> Source,
) {
    for (id, flag, key, values) in [
        ("store", "--store", keys::STORE_URL, &flags.store),
        ("freshness", "--freshness", keys::STORE_FRESHNESS, &flags.freshness),
    ] {
        for text in each(values, source(id)) {
            match text.split_once('=') {
                Some((name, value)) => settings.set_store(name, key.name, Value::String(value.to_owned()), source(id)),
                None => faults.push(Fault::new(flag, format!("`{text}` is not NAME=VALUE"))),
            }
        }
    }
    for text in each(&flags.store_option, source("store_option")) {
        let parts = text.split_once('=').and_then(|(path, value)| Some((path.split_once('.')?, value)));
        let Some(((name, key), value)) = parts else {
            // It is not repeated: it may be a secret.
            faults.push(Fault::new("--store-option", "must be NAME.KEY=VALUE"));
            continue;
        };
        let options = &mut settings.stores.entry(name.to_owned()).or_default().options;
        options.insert(key.to_owned(), Value::String(value.to_owned()));
    }
}
