//! Fills, a cache, slow clients and a governor, in many thousand orders of their steps: payload never passes its room and
//! its share, nobody waits for ever, and what was taken is all given back.

use std::collections::VecDeque;
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

use crate::ledger::{Charge, Ledger};
use crate::sync::FOR_EVER;

/// Bytes of an extent, and of a small piece.
const EXTENT: u64 = 4;
const PIECE: u64 = 1;
/// What may land: two extents. The share is three, beside a reserve of one piece.
const ROOM: u64 = 2 * EXTENT;
const SHARE: u64 = 3 * EXTENT;
const RESERVE: u64 = PIECE;
const IN_FLIGHT: u64 = SHARE + RESERVE;

const SCHEDULES: usize = 3000;

/// A cache as the server's: what it lets go is charged to those who still hold it.
struct Cache {
    ledger: Arc<Ledger>,
    extents: Mutex<VecDeque<Arc<Charge>>>,
}

impl Cache {
    fn insert(&self, extent: Arc<Charge>) {
        extent.cached();
        self.extents.lock().unwrap().push_back(extent);
        self.fit();
    }

    /// Lets go of the oldest, until the rest has room.
    fn fit(&self) {
        let mut extents = self.extents.lock().unwrap();
        while extents.iter().map(|extent| extent.bytes()).sum::<u64>() > self.ledger.room_for_cache() {
            let Some(oldest) = extents.pop_front() else { return };
            oldest.pinned();
        }
    }
}

/// All together, with what they may never hold.
struct Model {
    ledger: Arc<Ledger>,
    cache: Cache,
}

impl Model {
    fn new(patience: Duration) -> Arc<Self> {
        let ledger = Ledger::new(ROOM, IN_FLIGHT, patience);
        let cache = Cache { ledger: Arc::clone(&ledger), extents: Mutex::new(VecDeque::new()) };
        Arc::new(Self { ledger, cache })
    }

    fn check(&self) {
        let live = self.ledger.held().live();
        assert!(live <= ROOM + IN_FLIGHT, "{live} bytes are held");
    }

    /// Fills an extent and has the cache keep it; without memory for it, reads past the cache in a small piece.
    async fn read(&self) -> Option<Arc<Charge>> {
        let (grant, bytes) = match self.ledger.grant(EXTENT).await {
            Ok(grant) => (Ok(grant), EXTENT),
            Err(_) => (self.ledger.grant_small(PIECE).await, PIECE),
        };
        let extent = Arc::new(grant.ok()?.charge(bytes).unwrap());
        self.check();
        if bytes == EXTENT {
            self.cache.insert(Arc::clone(&extent));
        } else {
            extent.pinned();
        }
        self.check();
        Some(extent)
    }

    /// All is given back once nobody holds anything.
    fn end(&self) {
        self.cache.extents.lock().unwrap().drain(..).for_each(|extent| extent.pinned());
        let (held, free) = (self.ledger.held(), self.ledger.in_flight_free());
        assert_eq!((held.live(), self.ledger.withheld(), free), (0, 0, SHARE), "{held:?}");
        assert!(block_on(self.ledger.grant(SHARE)).is_ok());
        assert!(block_on(self.ledger.grant_small(RESERVE)).is_ok());
    }
}

fn in_many_orders(model: fn()) {
    shuttle::check_random(model, SCHEDULES);
    shuttle::check_pct(model, SCHEDULES, 3);
}

/// Readers whose patience may end at any moment, while the room changes.
#[test]
fn payload_never_passes_its_room_and_its_share() {
    in_many_orders(|| {
        let model = Model::new(Duration::ZERO);
        let mut threads = Vec::new();
        for _ in 0..3 {
            let model = Arc::clone(&model);
            threads.push(thread::spawn(move || {
                for _ in 0..2 {
                    let extent = block_on(model.read());
                    thread::yield_now();
                    if let Some(extent) = &extent {
                        extent.queued();
                        extent.written();
                    }
                }
            }));
        }
        let governed = Arc::clone(&model);
        threads.push(thread::spawn(move || {
            for room in [0, ROOM / 2, ROOM] {
                governed.ledger.set_room(room);
                governed.cache.fit();
                governed.check();
            }
        }));
        for thread in threads {
            thread.join().unwrap();
        }
        model.end();
    });
}

/// Nobody loses patience: whoever waits is served although a client keeps what it has been given for as long as the others
/// read, and the cache is full. The scheduler reports a deadlock where it can.
#[test]
fn nobody_waits_for_ever() {
    in_many_orders(|| {
        let model = Model::new(FOR_EVER);
        let slow = block_on(model.read()).unwrap();
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let model = Arc::clone(&model);
                thread::spawn(move || {
                    for _ in 0..2 {
                        assert_eq!(block_on(model.read()).unwrap().bytes(), EXTENT);
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
        drop(slow);
        model.end();
    });
}

/// The governor is told whenever bytes are withheld: it is the one who makes the cache let go.
#[test]
fn the_governor_hears_of_what_is_withheld() {
    in_many_orders(|| {
        let model = Model::new(FOR_EVER);
        let extents: Vec<_> = (0..2).map(|_| block_on(model.read()).unwrap()).collect();
        let governed = Arc::clone(&model);
        let governor = thread::spawn(move || {
            while governed.ledger.withheld() == 0 {
                block_on(governed.ledger.cramped());
            }
            governed.cache.fit();
        });
        model.ledger.set_room(0);
        governor.join().unwrap();
        drop(extents);
        model.end();
    });
}
