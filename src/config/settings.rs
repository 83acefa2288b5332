//! What was written in the file, the environment and the flags: plain data, not yet checked.

use std::collections::BTreeMap;

use toml::Value;

/// Where a setting was written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Source {
    /// The configuration file.
    File,
    /// An environment variable.
    Env,
    /// A flag.
    Flag,
}

/// One value and where it came from.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The value as written.
    pub value: Value,
    /// Where it was written.
    pub source: Source,
}

/// All that was written.
#[derive(Clone, Default, Debug)]
pub struct Settings {
    /// By `section.key`.
    pub keys: BTreeMap<String, Setting>,
    /// By the store's name.
    pub stores: BTreeMap<String, StoreSettings>,
}

/// What was written for one store.
#[derive(Clone, Default, Debug)]
pub struct StoreSettings {
    /// By key.
    pub keys: BTreeMap<String, Setting>,
    /// `object_store`'s own keys.
    pub options: BTreeMap<String, Value>,
}

/// A fault of the configuration: which key, and what would be right.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The key, or the flag.
    pub key: String,
    /// What is wrong with it.
    pub problem: String,
}

impl Fault {
    /// A fault of `key`.
    pub fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { key: key.into(), problem: problem.into() }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.key, self.problem)
    }
}

impl Settings {
    /// Reads a TOML file. Keys that do not exist are found later, when all known ones have been taken.
    pub fn from_toml(text: &str, faults: &mut Vec<Fault>) -> Self {
        let mut settings = Self::default();
        let table = match text.parse::<toml::Table>() {
            Ok(table) => table,
            Err(error) => {
                faults.push(Fault::new("--config", format!("not TOML: {}", error.to_string().trim_end())));
                return settings;
            }
        };
        for (section, value) in table {
            match value {
                Value::Table(stores) if section == "stores" => settings.take_stores(stores, faults),
                Value::Table(keys) => {
                    for (key, value) in keys {
                        settings.set(&format!("{section}.{key}"), value, Source::File);
                    }
                }
                value => settings.set(&section, value, Source::File),
            }
        }
        settings
    }

    /// Sets a key, unless something stronger has set it already.
    pub fn set(&mut self, key: &str, value: Value, source: Source) {
        set(&mut self.keys, key, value, source);
    }

    /// Sets a key of a store, likewise.
    pub fn set_store(&mut self, store: &str, key: &str, value: Value, source: Source) {
        set(&mut self.stores.entry(store.to_owned()).or_default().keys, key, value, source);
    }

    fn take_stores(&mut self, stores: toml::Table, faults: &mut Vec<Fault>) {
        for (name, value) in stores {
            let Value::Table(keys) = value else {
                faults.push(Fault::new(format!("stores.{name}"), "must be a table with a `url`"));
                continue;
            };
            self.stores.entry(name.clone()).or_default();
            for (key, value) in keys {
                match value {
                    Value::Table(options) if key == "options" => {
                        self.stores.entry(name.clone()).or_default().options.extend(options);
                    }
                    value => self.set_store(&name, &key, value, Source::File),
                }
            }
        }
    }
}

fn set(keys: &mut BTreeMap<String, Setting>, key: &str, value: Value, source: Source) {
    if keys.get(key).is_none_or(|present| present.source <= source) {
        keys.insert(key.to_owned(), Setting { value, source });
    }
}
