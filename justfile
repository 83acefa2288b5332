# Each recipe is a step of CI; `just ci` runs them all.

default: ci

ci: fmt clippy test emulators deny

fmt:
    cargo fmt --all --check

clippy:
    cargo clippy --all-targets --locked -- -D warnings

test:
    cargo test --locked

# Reads from emulators of S3 and Azure (installs them from PyPI and npm).
emulators:
    tests/emulators/run

# Licences, sources and bans; advisories need the database, which only a machine with a network has.
deny:
    cargo deny --locked check licenses bans sources

serve *FLAGS:
    cargo run --release -- serve {{FLAGS}}

# The reference of the configuration, generated from src/config/keys.rs.
reference:
    UPDATE_REFERENCE=1 cargo test --lib reference

# Hot reads from memory against a bare axum handler, alternating in one run (needs wrk).
hot:
    benches/hot
