//! Connections to stores: through a proxy where one is configured, with TLS, and counted while they are open.

use std::error::Error as StdError;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::Uri;
use http::uri::Scheme;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio::net::TcpStream;
use tower_service::Service;

/// Connections that are open, idle ones included: each has a read buffer, which `/debug/memory` accounts for.
#[derive(Clone, Default, Debug)]
pub struct Connections(Arc<AtomicU64>);

impl Connections {
    /// How many.
    pub fn open(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a store is connected to.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) connect_timeout: Duration,
    pub(super) proxies: Arc<Matcher>,
    /// Whether plain HTTP is allowed.
    pub(super) allow_http: bool,
    /// Whether any certificate is believed.
    pub(super) allow_invalid_certificates: bool,
    pub(super) connections: Connections,
}

impl Route {
    pub(super) fn connector(self) -> Result<HttpsConnector<Dialer>, rustls::Error> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let tls = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let tls = if self.allow_invalid_certificates {
            tls.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(provider))).with_no_client_auth()
        } else {
            tls.with_platform_verifier()?.with_no_client_auth()
        };
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(self.connect_timeout));
        let dialer = Dialer { tcp, proxies: self.proxies, connections: self.connections };
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls);
        let builder = if self.allow_http { builder.https_or_http() } else { builder.https_only() };
        Ok(builder.enable_http1().wrap_connector(dialer))
    }
}

/// Opens connections, below TLS.
#[derive(Clone, Debug)]
pub(super) struct Dialer {
    tcp: HttpConnector,
    proxies: Arc<Matcher>,
    connections: Connections,
}

impl Service<Uri> for Dialer {
    type Response = Dialled;
    type Error = Box<dyn StdError + Send + Sync>;
    type Future = BoxFuture<'static, Result<Dialled, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let (mut tcp, connections) = (self.tcp.clone(), self.connections.clone());
        let proxy = self.proxies.intercept(&to);
        Box::pin(async move {
            let Some(proxy) = proxy else {
                return Ok(Dialled::new(tcp.call(to).await?, false, connections));
            };
            if proxy.uri().scheme() != Some(&Scheme::HTTP) {
                return Err("a proxy is spoken to by HTTP: its URL has to begin with http://".into());
            }
            if to.scheme() == Some(&Scheme::HTTP) {
                return Ok(Dialled::new(tcp.call(proxy.uri().clone()).await?, true, connections));
            }
            let tunnel = Tunnel::new(proxy.uri().clone(), tcp);
            let mut tunnel = match proxy.basic_auth() {
                Some(auth) => tunnel.with_auth(auth.clone()),
                None => tunnel,
            };
            Ok(Dialled::new(tunnel.call(to).await?, false, connections))
        })
    }
}

/// An open connection.
#[derive(Debug)]
pub(super) struct Dialled {
    stream: TokioIo<TcpStream>,
    /// Whether requests on it name the whole URL, for a proxy to read.
    is_proxied: bool,
    connections: Connections,
}

impl Dialled {
    fn new(stream: TokioIo<TcpStream>, is_proxied: bool, connections: Connections) -> Self {
        connections.0.fetch_add(1, Ordering::Relaxed);
        Self { stream, is_proxied, connections }
    }
}

impl Drop for Dialled {
    fn drop(&mut self) {
        self.connections.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection for Dialled {
    fn connected(&self) -> Connected {
        self.stream.connected().proxy(self.is_proxied)
    }
}

impl Read for Dialled {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl Write for Dialled {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }
}

/// Believes any certificate: for a store whose options say so.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
