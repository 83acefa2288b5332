//! What every client connection passes: the limit on their number, `TCP_NODELAY`, and how long it is waited for.

use std::future::{Ready, ready};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum_server::accept::Accept;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_io_timeout::TimeoutStream;

use crate::governor::Governor;
use crate::telemetry::Metrics;

/// How long a client's rate is measured before it is judged.
const RATE_PERIOD: Duration = Duration::from_secs(30);

/// How long clients that take their time are waited for.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    /// Longest time without a byte taken.
    pub(super) stall_timeout: Duration,
    /// Least bytes a second, while memory is short.
    pub(super) rate_min: u64,
    pub(super) governor: Arc<Governor>,
}

/// Lets connections in.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    places: Arc<Semaphore>,
    limit: &'static str,
    patience: Patience,
    metrics: Arc<Metrics>,
}

impl Gate {
    /// A gate to these places, which the metrics know as that limit.
    pub(super) fn new(places: Arc<Semaphore>, limit: &'static str, patience: Patience, metrics: Arc<Metrics>) -> Self {
        Self { places, limit, patience, metrics }
    }

    fn admit(&self, stream: TcpStream) -> io::Result<Connection> {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            self.metrics.refused(self.limit);
            return Err(io::Error::other("all connections that there may be are open"));
        };
        // Without it a proxy in front shows a constant 40 ms (delayed acknowledgements).
        stream.set_nodelay(true)?;
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.patience.stall_timeout));
        let stream = Box::pin(stream);
        Ok(Connection {
            stream,
            pace: Pace::new(self.patience.clone()),
            metrics: Arc::clone(&self.metrics),
            _place: place,
        })
    }
}

impl<S> Accept<TcpStream, S> for Gate {
    type Stream = Connection;
    type Service = S;
    type Future = Ready<io::Result<(Connection, S)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        ready(self.admit(stream).map(|connection| (connection, service)))
    }
}

/// How fast a client takes what is sent.
#[derive(Debug)]
struct Pace {
    patience: Patience,
    /// Since when it has been waited for; `None` while it has taken all there was.
    blocked_since: Option<Instant>,
    /// How long it has been waited for in this period. Time in which there was nothing to send does not count.
    waited: Duration,
    /// Bytes that it has taken in this period.
    bytes: u64,
}

impl Pace {
    const fn new(patience: Patience) -> Self {
        Self { patience, blocked_since: None, waited: Duration::ZERO, bytes: 0 }
    }

    /// Notes a write; whether the client is too slow to be waited for any longer.
    fn is_too_slow(&mut self, written: &Poll<io::Result<usize>>) -> bool {
        let Poll::Ready(Ok(bytes)) = written else {
            self.blocked_since.get_or_insert_with(Instant::now);
            return false;
        };
        self.bytes = self.bytes.saturating_add(*bytes as u64);
        self.waited += self.blocked_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        if self.waited < RATE_PERIOD {
            return false;
        }
        let is_too_slow = self.bytes < self.patience.rate_min.saturating_mul(self.waited.as_secs());
        (self.waited, self.bytes) = (Duration::ZERO, 0);
        is_too_slow && self.patience.governor.is_pressed()
    }
}

/// A client connection. A write that makes no progress for the stall timeout is an error, and ends it; while memory is
/// short, so is one that makes hardly any.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    pace: Pace,
    metrics: Arc<Metrics>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    fn judge(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if self.pace.is_too_slow(&written) {
            self.metrics.refused("server.write_rate_min");
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client takes too few bytes a second",
            )));
        }
        written
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.stream.as_mut().poll_write(cx, bytes);
        self.judge(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.stream.as_mut().poll_write_vectored(cx, slices);
        self.judge(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }
}
