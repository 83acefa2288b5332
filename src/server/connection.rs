//! What every client connection passes: the limit on their number, `TCP_NODELAY`, and the write stall timeout.

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
use tokio_io_timeout::TimeoutStream;

use crate::telemetry::Metrics;

/// Lets connections in.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    places: Arc<Semaphore>,
    limit: &'static str,
    write_stall_timeout: Duration,
    metrics: Arc<Metrics>,
}

impl Gate {
    /// A gate with so many places, which the metrics know as that limit.
    pub(super) fn new(
        places: usize,
        limit: &'static str,
        write_stall_timeout: Duration,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { places: Arc::new(Semaphore::new(places)), limit, write_stall_timeout, metrics }
    }

    fn admit(&self, stream: TcpStream) -> io::Result<Connection> {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            self.metrics.refused(self.limit);
            return Err(io::Error::other("all connections that there may be are open"));
        };
        // Without it a proxy in front shows a constant 40 ms (delayed acknowledgements).
        stream.set_nodelay(true)?;
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.write_stall_timeout));
        Ok(Connection { stream: Box::pin(stream), _place: place })
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

/// A client connection. A write that makes no progress for the stall timeout is an error, and ends it.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    _place: OwnedSemaphorePermit,
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write_vectored(cx, slices)
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
