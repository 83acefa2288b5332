//! Openings: learning of an object by reading it, so that a first read costs one request.

use std::num::NonZeroU64;
use std::sync::Arc;

use backon::Retryable;
use tokio::time::Instant;

use super::run::Run;
use super::{Arrived, Fetcher, Passage};
use crate::error::{Error, Kind};
use crate::flight::{Interest, Landing, Waiter};
use crate::ledger::Grant;
use crate::metadata::Known;
use crate::object::{ExtentKey, Metadata, ObjectName};
use crate::range::{ByteRange, RangeSpec};
use crate::store::{Answer, Span, Store, Turn};

/// The first GET of an object of which nothing was known: what it taught, and the extents it is filling.
#[derive(Debug)]
pub struct Opening {
    /// What the store said.
    pub metadata: Arc<Metadata>,
    /// The bytes that are being fetched, from the start of what the spec resolves to.
    pub range: ByteRange,
    /// The first extent of them.
    pub first: Waiter<Arrived>,
}

/// How an opening was come by.
#[derive(Debug)]
pub enum Opened {
    /// By this read's own GET.
    Led(Arc<Opening>),
    /// By another's, which asked for the same.
    Joined(Arc<Opening>),
    /// Another read has learned the metadata meanwhile.
    Known,
}

/// What the first GET asks for, and the bytes of its first extent, which there is a grant for before it.
#[derive(Clone, Copy, Debug)]
struct FirstGet {
    span: Span,
    weight: u64,
}

/// Its answer, what it was given to be asked with, and when it was asked for.
struct FirstAnswer {
    answer: Answer,
    turn: Turn,
    grant: Grant,
    asked_at: Instant,
}

type OpeningLanding = Landing<(ObjectName, RangeSpec), Arc<Opening>>;

impl Fetcher {
    /// Learns of an object by reading: one GET for (the beginning of) what is asked for, and no HEAD before it.
    ///
    /// [`Kind::RangeRefused`] says that only the object's size can tell what the range means: the object
    /// is empty, or shorter than the range's start.
    pub async fn open(
        self: &Arc<Self>,
        store: &Arc<Store>,
        name: &ObjectName,
        spec: RangeSpec,
    ) -> Result<Opened, Error> {
        let first = self.first_get(spec).ok_or_else(|| Error::new(Kind::RangeRefused, "no object has such bytes"))?;
        let (waiter, led) = {
            let mut tower = self.openings.look();
            let key = (name.clone(), spec);
            if let Some(waiter) = tower.join(&key) {
                (waiter, false)
            } else if !matches!(self.directory.known(name, store.freshness(), None), Known::Nothing) {
                return Ok(Opened::Known);
            } else {
                let interest = Arc::new(Interest::default());
                let (landing, waiter) = tower.lead(key, &interest);
                let (fetcher, store) = (Arc::clone(self), Arc::clone(store));
                self.tracker.spawn(async move { fetcher.lead_opening(store, first, landing, interest).await });
                (waiter, true)
            }
        };
        let opening = waiter.wait().await?;
        Ok(if led { Opened::Led(opening) } else { Opened::Joined(opening) })
    }

    async fn lead_opening(
        self: Arc<Self>,
        store: Arc<Store>,
        first: FirstGet,
        landing: OpeningLanding,
        interest: Arc<Interest>,
    ) {
        let (name, _) = landing.key();
        match self.first_answer(&store, name, first).await {
            Ok(first) => {
                let (run, answer) = self.begin(&store, landing, interest, first);
                self.fill_from(run, answer).await;
            }
            Err(error) => landing.land(Err(error)),
        }
    }

    async fn first_answer(&self, store: &Arc<Store>, name: &ObjectName, first: FirstGet) -> Result<FirstAnswer, Error> {
        let turn = store.turn().await?;
        let grant = self.ledger.grant(first.weight).await?;
        let asked_at = Instant::now();
        let get = || store.get(&turn, &name.key, first.span, None);
        let answer = get.retry(self.pauses()).when(|error: &Error| error.kind().is_transient()).await?;
        Ok(FirstAnswer { answer, turn, grant, asked_at })
    }

    fn first_get(&self, spec: RangeSpec) -> Option<FirstGet> {
        let run_max = self.config.run_max;
        let span = match spec {
            RangeSpec::Whole => Span::Part(ByteRange::new(0, run_max.get())?),
            RangeSpec::From(start) => Span::Part(ByteRange::new(start, start.saturating_add(run_max.get()))?),
            RangeSpec::Part(range) => Span::Part(range.head(run_max)),
            RangeSpec::Suffix(length) => Span::Suffix(NonZeroU64::new(length)?),
        };
        let length = match span {
            Span::Part(range) => range.len(),
            Span::Suffix(length) => length.get(),
        };
        Some(FirstGet { span, weight: self.arena.weight_of(length.min(self.config.extent_max.get())) })
    }

    /// Makes what was learned known, and the extents of the answer joinable.
    fn begin(
        &self,
        store: &Arc<Store>,
        landing: OpeningLanding,
        interest: Arc<Interest>,
        first: FirstAnswer,
    ) -> (Run, Answer) {
        let FirstAnswer { answer, turn, grant, asked_at } = first;
        let metadata = Arc::new(self.directory.dated(answer.metadata.clone()));
        let range = answer.range.head(self.config.run_max);
        // A flight of the same extent that is under way for another range goes on beside this one: whoever joins from here
        // on joins this one. The bytes of both are the same version's.
        let mut tower = self.extents.look();
        let mut lead = |piece| tower.lead(ExtentKey::new(Arc::clone(&metadata.id), piece), &interest);
        let mut pieces = range.cut(self.config.extent_max);
        let (landing_of_first, first) = lead(pieces.next().unwrap_or(range));
        let landings = std::iter::once(landing_of_first).chain(pieces.map(|piece| lead(piece).0)).collect();
        drop(tower);
        // In this order: whoever sees the metadata sees the flights.
        self.directory.learned(&metadata, asked_at);
        let target = self.target(store, &metadata, Passage::Through);
        let run = Run::new(&target, range, landings, interest);
        landing.land(Ok(Arc::new(Opening { metadata, range, first })));
        (run.with(turn, grant), answer)
    }
}
