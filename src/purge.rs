//! Purges: objects whose older extents must not be served again, not even after a restart.
//!
//! Nothing lists the extents of an object. Instead each purge begins a new epoch of the object: the epoch is part of every
//! identity, in memory and on disk, so what belongs to an older one cannot be found any more and falls out in time.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::object::{ObjectKey, ObjectName, StoreName};

/// Objects whose purges are remembered one by one, some 200 B each; beyond them everything begins a new epoch.
const PURGES_MAX: usize = 20_000;

/// The log of purges, in the directory of the disk tier.
const LOG_FILE: &str = "purges.jsonl";

/// What was purged, and since when.
#[derive(Debug)]
pub struct Purges {
    epochs: RwLock<Epochs>,
    /// How many there are, so that a read need not take the lock while there are none.
    count: AtomicUsize,
    log: Option<Mutex<File>>,
}

#[derive(Debug, Default)]
struct Epochs {
    /// The epoch of every object that has no later one of its own.
    floor: u64,
    objects: HashMap<ObjectName, u64>,
}

/// A line of the log; without a name it is the floor.
#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    epoch: u64,
}

impl Purges {
    /// Purges that last as long as this process: there is nothing on disk.
    pub fn in_memory() -> Self {
        Self::of(Epochs::default(), None)
    }

    /// Purges of a disk tier's directory. The log is written anew, without what later lines have made void.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let path = directory.join(LOG_FILE);
        let mut epochs = Epochs::default();
        if let Ok(file) = File::open(&path) {
            // A line that was cut off by a crash was not acknowledged.
            for line in BufReader::new(file).lines().map_while(Result::ok) {
                if let Ok(line) = serde_json::from_str(&line) {
                    epochs.replay(&line);
                }
            }
        }
        let mut text = Line { store: None, key: None, epoch: epochs.floor }.text();
        epochs.objects.iter().for_each(|(name, epoch)| text.push_str(&Line::of(name, *epoch).text()));
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, text)?;
        File::open(&fresh)?.sync_all()?;
        std::fs::rename(&fresh, &path)?;
        let log = OpenOptions::new().append(true).open(&path)?;
        Ok(Self::of(epochs, Some(Mutex::new(log))))
    }

    fn of(epochs: Epochs, log: Option<Mutex<File>>) -> Self {
        let count = AtomicUsize::new(epochs.objects.len() + usize::from(epochs.floor > 0));
        Self { epochs: RwLock::new(epochs), count, log }
    }

    /// The epoch that an object is in now.
    pub fn epoch_of(&self, name: &ObjectName) -> u64 {
        if self.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let epochs = self.epochs.read().unwrap_or_else(PoisonError::into_inner);
        epochs.objects.get(name).copied().unwrap_or(0).max(epochs.floor)
    }

    /// Begins a new epoch of an object. It is on disk when this returns.
    pub fn purge(&self, name: &ObjectName) -> io::Result<()> {
        // The clock makes epochs that are later than those of earlier processes; `max` those of this one.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX - 1);
        let epoch = now.max(self.epoch_of(name) + 1);
        let mut epochs = self.epochs.write().unwrap_or_else(PoisonError::into_inner);
        let full = epochs.objects.len() >= PURGES_MAX && !epochs.objects.contains_key(name);
        let line = if full { Line { store: None, key: None, epoch } } else { Line::of(name, epoch) };
        if let Some(log) = &self.log {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            log.write_all(line.text().as_bytes())?;
            log.sync_data()?;
        }
        epochs.replay(&line);
        self.count.store(epochs.objects.len() + usize::from(epochs.floor > 0), Ordering::Release);
        Ok(())
    }
}

impl Epochs {
    fn replay(&mut self, line: &Line) {
        let name = line.store.as_deref().and_then(StoreName::new).zip(line.key.as_deref().and_then(ObjectKey::new));
        if let Some((store, key)) = name {
            self.objects.insert(ObjectName { store, key }, line.epoch);
        } else {
            self.floor = self.floor.max(line.epoch);
            self.objects.retain(|_, epoch| *epoch > line.epoch);
        }
    }
}

impl Line {
    fn of(name: &ObjectName, epoch: u64) -> Self {
        let (store, key) = (name.store.as_str().to_owned(), name.key.as_str().to_owned());
        Self { store: Some(store), key: Some(key), epoch }
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(key: &str) -> ObjectName {
        ObjectName { store: StoreName::new("s").unwrap(), key: ObjectKey::new(key).unwrap() }
    }

    #[test]
    fn epochs_only_grow_and_are_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let purges = Purges::open(directory.path()).unwrap();
        assert_eq!(purges.epoch_of(&name("a")), 0);
        purges.purge(&name("a")).unwrap();
        let first = purges.epoch_of(&name("a"));
        purges.purge(&name("a")).unwrap();
        let second = purges.epoch_of(&name("a"));
        assert!(second > first && first > 0 && purges.epoch_of(&name("b")) == 0);

        for _ in 0..2 {
            let again = Purges::open(directory.path()).unwrap();
            assert_eq!((again.epoch_of(&name("a")), again.epoch_of(&name("b"))), (second, 0));
        }
        let log = directory.path().join(LOG_FILE);
        let text = std::fs::read_to_string(&log).unwrap();
        assert_eq!(text.lines().count(), 2, "void lines are gone: {text}");
        std::fs::write(&log, text + "{\"store\":\"s\",\"key\":\"b\",\"epo").unwrap();
        assert_eq!(Purges::open(directory.path()).unwrap().epoch_of(&name("a")), second);
    }

    #[test]
    fn too_many_purges_purge_everything() {
        let purges = Purges::in_memory();
        for index in 0..=PURGES_MAX {
            purges.purge(&name(&index.to_string())).unwrap();
        }
        assert!(purges.epoch_of(&name("another")) > 0);
        assert!(purges.epochs.read().unwrap().objects.is_empty());
    }
}
