# Two stages: the toolchain builds, a slim base runs. The binary keeps its line tables, so that heap profiles have names.
ARG RUST_IMAGE=docker.io/library/rust:1.95-bookworm
ARG BASE_IMAGE=docker.io/library/debian:bookworm-slim

FROM ${RUST_IMAGE} AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY src src
COPY benches/bare.rs benches/bare.rs
ARG HALFOPEN_REVISION=unknown
ENV HALFOPEN_REVISION=${HALFOPEN_REVISION}
RUN cargo build --release --locked --bin halfopen \
    && objcopy --compress-debug-sections=zlib target/release/halfopen

FROM ${BASE_IMAGE}
# Certificates for TLS to stores: the build stage's, so that nothing has to be installed here.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /src/target/release/halfopen /usr/local/bin/halfopen
COPY LICENSE /usr/share/doc/halfopen/LICENSE
# The root may be read-only: heap profiles are dumped into TMPDIR, the disk tier goes where --disk-path says.
ENV TMPDIR=/tmp
VOLUME ["/tmp", "/var/lib/halfopen"]
USER 10001:10001
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/halfopen"]
CMD ["serve", "--listen", "0.0.0.0:8080", "--admin-listen", "0.0.0.0:9090"]
