//! A run: neighbouring extents filled one after the other from one GET, and again from where it broke.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use backon::BackoffBuilder;
use tokio::time::Instant;

use super::{Arrived, Fetcher, Passage, Target};
use crate::buffer::arena::Arena;
use crate::buffer::{ExactBuffer, Inexact};
use crate::error::{Error, Kind};
use crate::flight::{Interest, Landing};
use crate::ledger::{Grant, is_for_want_of_memory};
use crate::object::{ExtentKey, Metadata};
use crate::range::ByteRange;
use crate::store::{Answer, Span, Turn};
use crate::telemetry::ByteSource;

/// How long an extent that has begun to arrive may go on when nobody waits for it: whoever was impatient finds it the
/// next time, and a store that drips does not keep the memory. A pause of the store itself ends by the stall timeout.
const UNWANTED_MAX: Duration = Duration::from_secs(5);

/// Neighbouring extents on their way from a store.
#[derive(Debug)]
pub(super) struct Run {
    target: Target,
    range: ByteRange,
    /// Extents still to come, in order; the first of them is in `buffer`.
    landings: VecDeque<Landing<ExtentKey, Arrived>>,
    buffer: Option<ExactBuffer>,
    /// For the extent that comes next.
    grant: Option<Grant>,
    turn: Option<Turn>,
    interest: Arc<Interest>,
    /// Since when nobody waits for it.
    unwanted_since: Option<Instant>,
}

impl Run {
    pub(super) fn new(
        target: &Target,
        range: ByteRange,
        landings: VecDeque<Landing<ExtentKey, Arrived>>,
        interest: Arc<Interest>,
    ) -> Self {
        Self {
            target: target.clone(),
            range,
            landings,
            buffer: None,
            grant: None,
            turn: None,
            interest,
            unwanted_since: None,
        }
    }

    pub(super) fn with(mut self, turn: Turn, grant: Grant) -> Self {
        (self.turn, self.grant) = (Some(turn), Some(grant));
        self
    }

    /// The bytes still to come.
    fn rest(&self) -> Option<ByteRange> {
        let extent = self.landings.front()?.key().range();
        let missing = self.buffer.as_ref().map_or(extent.len(), |buffer| buffer.missing() as u64);
        ByteRange::new(extent.end() - missing, self.range.end())
    }

    /// Takes the bytes that came, as far as they belong to this run; gives back those that do not.
    ///
    /// The last extent does not land here but when the body has ended: a body that goes on was not the one announced.
    /// Before each extent its memory is waited for; nothing is held then, and the store waits with us.
    async fn take<'a>(&mut self, mut bytes: &'a [u8], fetcher: &Fetcher) -> Result<&'a [u8], Error> {
        while !bytes.is_empty() && self.rest().is_some() {
            let Some(landing) = self.landings.front() else { break };
            let mut buffer = if let Some(buffer) = self.buffer.take() {
                buffer
            } else {
                let extent = landing.key().range();
                let grant = match self.grant.take() {
                    Some(grant) => grant,
                    None => fetcher.grant(&self.target, extent).await?,
                };
                allocate_for_fill(&fetcher.arena, extent, grant)?
            };
            let (now, later) = bytes.split_at(bytes.len().min(buffer.missing()));
            buffer.append(now).map_err(inexact)?;
            bytes = later;
            if buffer.missing() > 0 || self.landings.len() == 1 {
                self.buffer = Some(buffer);
                continue;
            }
            self.land(buffer, fetcher)?;
            self.give_up_unless_wanted(fetcher)?;
        }
        Ok(bytes)
    }

    /// Lands the first extent: into the cache, then to those who wait.
    fn land(&mut self, buffer: ExactBuffer, fetcher: &Fetcher) -> Result<(), Error> {
        let extent = buffer.finish().inspect_err(|_| fetcher.metrics.not_stored("inexact")).map_err(inexact)?;
        if let Some(landing) = self.landings.pop_front() {
            if self.target.passage.is_past_the_cache() {
                extent.charge().pinned();
            } else {
                fetcher.cache.insert(landing.key().clone(), extent.clone());
            }
            landing.land(Ok(Arrived { extent, source: ByteSource::Upstream }));
        }
        Ok(())
    }

    /// Fails when nobody waits for what is still to come. What has begun to arrive is not thrown away for it: this is
    /// asked between extents.
    fn give_up_unless_wanted(&self, fetcher: &Fetcher) -> Result<(), Error> {
        if self.interest.is_wanted() || !fetcher.extents.look().give_up(self.landings.iter(), &self.interest) {
            return Ok(());
        }
        Err(Error::new(Kind::Abandoned, "nobody waits for the rest of the run"))
    }

    /// The same between two pieces of a body, once what has begun to arrive has had its time to end.
    fn give_up_if_long_unwanted(&mut self, fetcher: &Fetcher) -> Result<(), Error> {
        if self.interest.is_wanted() {
            self.unwanted_since = None;
            return Ok(());
        }
        let since = *self.unwanted_since.get_or_insert_with(Instant::now);
        if since.elapsed() < UNWANTED_MAX { Ok(()) } else { self.give_up_unless_wanted(fetcher) }
    }

    /// After a body that did not end well: its last extent, if it seemed whole, cannot be trusted.
    fn distrust(&mut self) {
        if let (None, Some(buffer)) = (self.rest(), &mut self.buffer) {
            buffer.clear();
        }
    }
}

/// The allocation of every fill: a name of its own in heap profiles, so that fills stand apart.
#[inline(never)]
fn allocate_for_fill(arena: &Arc<Arena>, extent: ByteRange, mut grant: Grant) -> Result<ExactBuffer, Error> {
    let buffer = ExactBuffer::allocate(arena, extent.len(), &mut grant);
    // Else the call above takes the place of this frame, and its name with it.
    std::hint::black_box(buffer)
}

fn inexact(inexact: Inexact) -> Error {
    Error::new(Kind::Internal, inexact.to_string())
}

impl Fetcher {
    /// Reads the one extent of a run from disk, and from the store if it is not there after all.
    pub(super) async fn read_from_disk(&self, mut run: Run) {
        let Some(landing) = run.landings.pop_front() else { return };
        match self.cache.load(landing.key()).await {
            Ok(Some(extent)) => landing.land(Ok(Arrived { extent, source: ByteSource::Disk })),
            Ok(None) => {
                run.landings.push_front(landing);
                self.fill(run).await;
            }
            Err(error) => landing.land(Err(error)),
        }
    }

    /// Fills a run from the beginning.
    pub(super) async fn fill(&self, mut run: Run) {
        let filled = match self.begin_fill(&mut run).await {
            Ok(()) => self.pour(&mut run, None).await,
            Err(error) => Err(error),
        };
        self.finish(run, filled);
    }

    /// Waits for a turn at the store, then for the memory of the first extent: whoever has memory can go on.
    async fn begin_fill(&self, run: &mut Run) -> Result<(), Error> {
        run.turn = Some(run.target.store.turn().await?);
        if let Some(first) = run.landings.front() {
            run.grant = Some(self.grant(&run.target, first.key().range()).await?);
        }
        run.give_up_unless_wanted(self)
    }

    /// The memory for one extent.
    async fn grant(&self, target: &Target, extent: ByteRange) -> Result<Grant, Error> {
        let weight = self.arena.weight_of(extent.len());
        match target.passage {
            Passage::InSmallPieces => self.ledger.grant_small(weight).await,
            Passage::Through | Passage::Past => self.ledger.grant(weight).await,
        }
    }

    /// Fills a run whose first GET has been answered.
    pub(super) async fn fill_from(&self, mut run: Run, answer: Answer) {
        let filled = self.pour(&mut run, Some(answer)).await;
        self.finish(run, filled);
    }

    /// Tells those who still wait what went wrong. Logged here, once for all of them.
    fn finish(&self, run: Run, filled: Result<(), Error>) {
        let Err(error) = filled else { return };
        match error.kind() {
            Kind::Changed | Kind::NotFound | Kind::RangeRefused => self.directory.disproved(&run.target.metadata),
            Kind::Abandoned => {}
            // Those who wait go on in small pieces: no fault of the store, and as many lines as there are fills.
            _ if is_for_want_of_memory(&error) => tracing::debug!(%error, "no memory for a fill"),
            kind => {
                let (object, range) = (run.target.metadata.id.name(), run.range);
                let detail = error.detail();
                tracing::warn!(store = %object.store, key = ?object.key, ?range, ?kind, detail, "fill failed");
            }
        }
        for landing in run.landings {
            landing.land(Err(error.clone()));
        }
    }

    /// Tries until the run is whole, each time from where the last try broke.
    async fn pour(&self, run: &mut Run, mut answer: Option<Answer>) -> Result<(), Error> {
        let mut pauses = self.pauses().build();
        loop {
            let error = match self.attempt(run, answer.take()).await {
                Ok(()) => return Ok(()),
                Err(error) if error.kind().is_transient() => error,
                Err(error) => return Err(error),
            };
            let Some(pause) = pauses.next() else { return Err(error) };
            tracing::debug!(?pause, %error, "a fill broke and is tried again");
            run.distrust();
            tokio::time::sleep(pause).await;
        }
    }

    async fn attempt(&self, run: &mut Run, answer: Option<Answer>) -> Result<(), Error> {
        let mut answer = match (answer, run.rest()) {
            (Some(answer), _) => answer,
            (None, Some(rest)) => {
                let key = &run.target.metadata.id.name().key;
                let turn = run.turn.as_ref().ok_or_else(|| Error::new(Kind::Internal, "a fill without a turn"))?;
                run.target.store.get(turn, key, Span::Part(rest), run.target.metadata.strong_etag()).await?
            }
            (None, None) => return Ok(()),
        };
        check_version(&answer, &run.target.metadata)?;
        // An answer holds more than the run where a suffix is longer than one.
        let surplus_expected = answer.range.end() > run.range.end();
        while let Some(bytes) = answer.next().await {
            let bytes = bytes?;
            run.give_up_if_long_unwanted(self)?;
            let surplus = run.take(&bytes, self).await?;
            if surplus_expected && run.rest().is_none() {
                break;
            }
            if !surplus.is_empty() {
                return Err(answer.broke_protocol(format!("the body is longer than {:?}", answer.range)));
            }
        }
        if let Some(rest) = run.rest() {
            return Err(answer.broke_protocol(format!("the body ended {} bytes before its end", rest.len())));
        }
        run.buffer.take().map_or(Ok(()), |last| run.land(last, self))
    }
}

/// Bytes of two versions are never joined.
fn check_version(answer: &Answer, expected: &Metadata) -> Result<(), Error> {
    if answer.metadata.id.version() != expected.id.version() {
        return Err(Error::new(Kind::Changed, "the object has another version now"));
    }
    let (size, before) = (answer.metadata.size, expected.size);
    if size == before {
        Ok(())
    } else {
        Err(answer.broke_protocol(format!("one version with {before} and {size} bytes")))
    }
}
