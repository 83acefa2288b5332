//! Typed reading of settings: each reader checks, notes the effective value, and collects faults.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use toml::Value;
use url::Url;

use super::keys::{self, Key};
use super::settings::{Fault, Setting, Settings, Source, StoreSettings};
use super::{Allowed, Freshness, StoreConfig};
use crate::object::StoreName;
use crate::telemetry::check_filter;

/// What is shown of a secret.
const HIDDEN: &str = "***";

/// The longest duration that may be configured: longer ones are mistakes, and far below what the clock can add.
const DURATION_MAX: Duration = Duration::from_hours(8784);

/// Reads settings one by one; what is left at the end are keys that do not exist.
#[derive(Debug)]
pub(super) struct Reader {
    settings: Settings,
    faults: Vec<Fault>,
    effective: BTreeMap<String, String>,
    /// Keys that were written, whether they have been read or not.
    written: BTreeSet<String>,
}

impl Allowed {
    const fn holds(self, value: u64) -> bool {
        self.least <= value && value <= self.most
    }
}

impl Reader {
    pub(super) fn new(settings: Settings, faults: Vec<Fault>) -> Self {
        let written = settings.keys.keys().cloned().collect();
        Self { settings, faults, effective: BTreeMap::new(), written }
    }

    /// Where a key was written, if it was.
    pub(super) fn source(&self, key: Key) -> Option<Source> {
        self.settings.keys.get(key.name).map(|setting| setting.source)
    }

    pub(super) fn fault(&mut self, key: Key, problem: impl Into<String>) {
        self.faults.push(Fault::new(key.name, problem));
    }

    /// Whether a key was written at all, rightly or not.
    pub(super) fn was_written(&self, key: Key) -> bool {
        self.written.contains(key.name)
    }

    pub(super) fn path(&mut self, key: Key) -> Option<PathBuf> {
        self.take(key, |text| if text.is_empty() { Err("is empty".to_owned()) } else { Ok(PathBuf::from(text)) })
    }

    pub(super) fn address(&mut self, key: Key) -> SocketAddr {
        let parsed = self.take(key, |text| text.parse().map_err(|_| "is not an address such as 127.0.0.1:8080".into()));
        parsed.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    pub(super) fn size(&mut self, key: Key, allowed: Allowed) -> Option<u64> {
        self.take(key, |text| {
            let size = text.parse::<ByteSize>().map_err(|_| "is not a size such as 512MiB or 2GiB")?.as_u64();
            let (least, most) = (ByteSize::b(allowed.least), ByteSize::b(allowed.most));
            if allowed.holds(size) { Ok(size) } else { Err(format!("must be from {least} to {most}")) }
        })
    }

    pub(super) fn count(&mut self, key: Key, allowed: Allowed) -> Option<u64> {
        self.take(key, |text| match text.parse() {
            Ok(count) if allowed.holds(count) => Ok(count),
            _ => Err(format!("must be a whole number from {} to {}", allowed.least, allowed.most)),
        })
    }

    /// A duration that is not zero.
    pub(super) fn duration(&mut self, key: Key) -> Duration {
        let nonzero =
            |duration: Duration| if duration.is_zero() { Err("must be longer".to_owned()) } else { Ok(duration) };
        self.take(key, |text| duration(text).and_then(nonzero)).unwrap_or_default()
    }

    /// A duration that may be zero.
    pub(super) fn duration_or_none(&mut self, key: Key) -> Duration {
        self.take(key, duration).unwrap_or_default()
    }

    pub(super) fn flag(&mut self, key: Key) -> bool {
        self.take(key, |text| text.parse().map_err(|_| "is not true or false".into())).unwrap_or_default()
    }

    pub(super) fn choice(&mut self, key: Key, of: &[&str]) -> String {
        let known = |text: &str| {
            if of.contains(&text) { Ok(text.to_owned()) } else { Err(format!("must be one of {}", of.join(", "))) }
        };
        self.take(key, known).unwrap_or_default()
    }

    /// Some of the words known, with commas between.
    pub(super) fn words(&mut self, key: Key, known: &[&str]) -> Vec<String> {
        let split = |text: &str| {
            let words: Vec<String> = text.split(',').map(|word| word.trim().to_owned()).collect();
            let unknown = words.iter().any(|word| !known.contains(&word.as_str()));
            if unknown { Err(format!("must be some of {}", known.join(", "))) } else { Ok(words) }
        };
        self.take(key, split).unwrap_or_default()
    }

    /// Directives of the log's filter.
    pub(super) fn filter(&mut self, key: Key) -> String {
        let check = |text: &str| match check_filter(text) {
            Ok(()) if text.trim().is_empty() => Err("is empty, which would log nothing: say `off`".to_owned()),
            Ok(()) => Ok(text.to_owned()),
            Err(problem) => Err(format!("is not a level or a list of directives: {problem}")),
        };
        self.take(key, check).unwrap_or_default()
    }

    pub(super) fn stores(&mut self) -> Vec<StoreConfig> {
        let stores = std::mem::take(&mut self.settings.stores);
        stores.into_iter().filter_map(|(name, settings)| self.store(&name, settings)).collect()
    }

    /// What was found wrong, unknown keys included, and the effective values.
    pub(super) fn finish(mut self) -> (Vec<Fault>, BTreeMap<String, String>) {
        let unknown = self.settings.keys.keys().map(|key| Fault::new(key, "is not a key of the configuration"));
        self.faults.extend(unknown);
        (self.faults, self.effective)
    }

    fn store(&mut self, name: &str, mut settings: StoreSettings) -> Option<StoreConfig> {
        let path = |key: &str| format!("stores.{name}.{key}");
        let before = self.faults.len();
        let url = self.store_url(&path(keys::STORE_URL.name), settings.keys.remove(keys::STORE_URL.name));
        let freshness = settings.keys.remove(keys::STORE_FRESHNESS.name);
        let freshness =
            freshness.map_or_else(|| keys::STORE_FRESHNESS.default.to_owned(), |setting| text(&setting.value));
        let parsed = parse_freshness(&freshness);
        self.note(path(keys::STORE_FRESHNESS.name), &freshness, parsed.as_ref().err());
        for key in settings.keys.keys() {
            self.faults.push(Fault::new(path(key), "is not a key of a store"));
        }
        let mut options = BTreeMap::new();
        for (key, value) in settings.options {
            if matches!(value, Value::Table(_) | Value::Array(_)) {
                self.faults.push(Fault::new(path(&format!("options.{key}")), "must be a single value"));
            }
            self.effective.insert(path(&format!("options.{key}")), HIDDEN.to_owned());
            options.insert(key, text(&value));
        }
        let valid = StoreName::new(name);
        if valid.is_none() {
            let rule = "a store's name has 1 to 63 letters, digits, '-', '_' or '.', and begins with a letter or digit";
            self.faults.push(Fault::new(format!("stores.{name}"), rule));
        }
        if self.faults.len() > before {
            return None;
        }
        Some(StoreConfig { name: valid?, url: url?, freshness: parsed.ok()?, options })
    }

    fn store_url(&mut self, path: &str, setting: Option<Setting>) -> Option<Url> {
        let Some(setting) = setting else {
            self.faults.push(Fault::new(path, "is missing: every store needs one"));
            return None;
        };
        match Url::parse(&text(&setting.value)) {
            // In abfss:// what stands before the @ is the container.
            Ok(url) if url.query().is_some() || url.fragment().is_some() => {
                self.faults.push(Fault::new(path, "must have no query and no fragment: they would be ignored"));
                None
            }
            Ok(url) if url.password().is_none() && (url.username().is_empty() || url.scheme().starts_with("abfs")) => {
                self.effective.insert(path.to_owned(), url.to_string());
                Some(url)
            }
            Ok(_) => {
                self.faults
                    .push(Fault::new(path, "must not hold credentials; give them as options or in the environment"));
                None
            }
            Err(error) => {
                self.faults.push(Fault::new(path, format!("is not a URL such as s3://bucket/prefix: {error}")));
                None
            }
        }
    }

    /// Takes a key's value, or its default, and parses it. `None` without a default, or after a fault.
    fn take<T>(&mut self, key: Key, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let written = self.settings.keys.remove(key.name).map(|setting| text(&setting.value));
        let value = match written {
            Some(value) => value,
            None if key.default.is_empty() => return None,
            None => key.default.to_owned(),
        };
        let parsed = parse(&value);
        self.note(key.name.to_owned(), &value, parsed.as_ref().err());
        parsed.ok()
    }

    fn note(&mut self, path: String, value: &str, problem: Option<&String>) {
        match problem {
            Some(problem) => self.faults.push(Fault::new(path, format!("`{value}` {problem}"))),
            None => drop(self.effective.insert(path, value.to_owned())),
        }
    }
}

/// A value as one would write it on the command line.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration > DURATION_MAX => Err("is longer than a year".to_owned()),
        Ok(duration) => Ok(duration),
        Err(_) => Err("is not a duration such as 250ms, 60s, 5m or 1h".to_owned()),
    }
}

fn parse_freshness(text: &str) -> Result<Freshness, String> {
    match text {
        "immutable" => Ok(Freshness::Immutable),
        "always" => Ok(Freshness::Always),
        text => duration(text)
            .map(Freshness::For)
            .map_err(|_| "is not `immutable`, `always`, or a duration such as 60s".to_owned()),
    }
}
