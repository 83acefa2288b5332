//! What the ledger promises, step by step.

use std::sync::Arc;
use std::time::Duration;

use halfopen::error::Kind;
use halfopen::ledger::{Charge, Ledger, is_for_want_of_memory};

/// With a reserve of 14 bytes this leaves a share of 100.
const IN_FLIGHT_BYTES: u64 = 114;

fn ledger() -> Arc<Ledger> {
    Ledger::new(1000, IN_FLIGHT_BYTES, Duration::from_millis(1))
}

#[tokio::test(start_paused = true)]
async fn a_grant_comes_back_whole_however_it_was_used() {
    let ledger = ledger();
    let mut grant = ledger.grant(80).await.unwrap();
    assert_eq!(ledger.in_flight_free(), 20);
    let stored = grant.charge(30).unwrap();
    let passed_on = grant.charge(20).unwrap();
    assert!(grant.charge(31).is_none());
    drop(grant);
    assert_eq!(ledger.in_flight_free(), 50);
    assert_eq!(ledger.held().filling, 50);

    stored.cached();
    assert_eq!((ledger.held().cached, ledger.in_flight_free()), (30, 80));
    stored.pinned();
    assert_eq!((ledger.held().pinned, ledger.in_flight_free()), (30, 80));
    stored.queued();
    assert_eq!(ledger.held().pinned, 30);
    stored.cached();
    stored.pinned();
    assert_eq!((ledger.held().disk_queue, ledger.held().pinned), (30, 0));
    stored.written();
    assert_eq!((ledger.held().disk_queue, ledger.held().pinned), (0, 30));
    passed_on.pinned();
    assert_eq!((ledger.held().pinned, ledger.in_flight_free()), (50, 80));

    drop(stored);
    drop(passed_on);
    assert_eq!((ledger.held().live(), ledger.in_flight_free()), (0, 100));
}

/// Lands `bytes` as the cache would take them.
async fn land(ledger: &Arc<Ledger>, bytes: u64) -> Charge {
    let charge = ledger.grant(bytes).await.unwrap().charge(bytes).unwrap();
    charge.cached();
    charge
}

#[tokio::test(start_paused = true)]
async fn what_has_landed_beyond_the_room_is_withheld_from_fills() {
    let ledger = Ledger::new(150, IN_FLIGHT_BYTES, Duration::from_millis(1));
    let (first, second) = (land(&ledger, 100).await, land(&ledger, 80).await);
    assert_eq!((ledger.withheld(), ledger.in_flight_free()), (30, 70));
    first.pinned();
    assert_eq!((ledger.room_for_cache(), ledger.in_flight_free()), (50, 70), "the cache let go, a response did not");
    let third = land(&ledger, 70).await;
    assert_eq!((ledger.held().live(), ledger.in_flight_free()), (250, 0), "room and share together, and no more");
    assert!(ledger.grant(1).await.is_err());
    drop(second);
    assert_eq!((ledger.withheld(), ledger.in_flight_free()), (20, 80));
    ledger.set_room(100);
    assert_eq!((ledger.withheld(), ledger.in_flight_free()), (70, 30));
    drop((first, third));
    assert_eq!((ledger.withheld(), ledger.in_flight_free(), ledger.room_for_cache()), (0, 100, 100));
    ledger.set_room(150);
    // What is past the cache stays in the share, and needs no room.
    let past = ledger.grant(60).await.unwrap().charge(60).unwrap();
    past.pinned();
    assert_eq!((ledger.in_flight_free(), ledger.room_for_cache()), (40, 150));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_granted_is_refused() {
    let ledger = ledger();
    let all = ledger.grant(100).await.unwrap();
    assert_eq!(ledger.grant(1).await.unwrap_err().kind(), Kind::Overloaded("memory.in_flight"));
    let small = ledger.grant_small(14).await.unwrap().charge(14).unwrap();
    assert!(is_for_want_of_memory(&ledger.grant_small(1).await.unwrap_err()));
    drop(small);
    assert!(ledger.grant_small(14).await.is_ok());
    drop(all);
    ledger.shed(true);
    assert_eq!(ledger.grant(1).await.unwrap_err().kind(), Kind::Overloaded("memory.limit"));
    ledger.shed(false);
    assert_eq!(ledger.grant(101).await.unwrap_err().kind(), Kind::Overloaded("memory.in_flight"));
    assert!(ledger.grant(100).await.is_ok());
}
