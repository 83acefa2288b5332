"""Puts objects into each emulator with its own client, and reads them back through the server.

There is none for gs here: gcp-storage-emulator sends no ETag, which Google's stores always do and object_store insists on,
ignores suffix ranges and does not list. tests/server/keys.rs reads gs from an upstream of the tests instead.
"""
import json, os, socket, subprocess, sys, time, urllib.error, urllib.parse, urllib.request

import boto3
from azure.storage.blob import BlobServiceClient

HOME = sys.argv[1]
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's, public
OBJECTS = {"plain": bytes(range(256)) * 40, "empty": b"", "dir/a b+c/ü!'()&=#?": b"an odd key", "big": os.urandom(3_000_001)}
processes, failures, passed = [], [], 0


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(port, *command, **environment):
    log = open(f"{HOME}/{os.path.basename(command[0])}.log", "wb")
    processes.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment}))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{command[0]} does not listen; see {log.name}")


def fill_s3(port):
    start(port, f"{HOME}/venv/bin/moto_server", "-H", "127.0.0.1", "-p", str(port))
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id="key",
                          aws_secret_access_key="secret", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    for key, body in OBJECTS.items():
        client.put_object(Bucket="bucket", Key=key, Body=body, ContentType="text/x-test")
    return "s3://bucket", {"aws_endpoint": f"http://127.0.0.1:{port}", "aws_access_key_id": "key",
                           "aws_secret_access_key": "secret", "aws_region": "us-east-1", "aws_allow_http": "true"}


def fill_az(port):
    start(port, f"{HOME}/node_modules/.bin/azurite-blob", "--disableTelemetry", "--silent", "--loose", "--skipApiVersionCheck",
          "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port))
    endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
    service = BlobServiceClient(endpoint, credential={"account_name": "devstoreaccount1", "account_key": AZURE_KEY})
    service.create_container("bucket")
    for key, body in OBJECTS.items():
        service.get_blob_client("bucket", key).upload_blob(body)
    return "az://bucket", {"azure_storage_account_name": "devstoreaccount1", "azure_storage_account_key": AZURE_KEY,
                           "azure_storage_endpoint": endpoint, "azure_allow_http": "true"}


def get(base, store, key, headers=None):
    request = urllib.request.Request(f"{base}/{store}/{urllib.parse.quote(key)}", headers=headers or {})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def check(what, condition, seen):
    global passed
    if condition:
        passed += 1
    else:
        failures.append(what)
        print(f"FAILED {what}: {seen}")


def check_store(base, store):
    for temperature in ("cold", "warm"):
        for key, body in OBJECTS.items():
            status, headers, got = get(base, store, key)
            check(f"{store} {temperature} {key!r} whole", (status, got) == (200, body), (status, len(got), headers))
        plain = OBJECTS["plain"]
        for spec, part in (("0-9", plain[:10]), ("100-", plain[100:]), ("-7", plain[-7:]), ("10000-99999", plain[10000:])):
            status, headers, got = get(base, store, "plain", {"Range": f"bytes={spec}"})
            check(f"{store} {temperature} {spec}", (status, got) == (206, part), (status, len(got), headers))
        status, headers, _ = get(base, store, "plain", {"Range": "bytes=10240-"})
        check(f"{store} {temperature} 416", (status, headers.get("content-range")) == (416, "bytes */10240"), (status, headers))
        check(f"{store} {temperature} missing", get(base, store, "missing")[0] == 404, "")
        big = OBJECTS["big"]
        status, headers, got = get(base, store, "big", {"Range": "bytes=-2500000"})
        check(f"{store} {temperature} big suffix", (status, got) == (206, big[-2500000:]), (status, len(got), headers))
    status, headers, _ = get(base, store, "plain", {"Range": "bytes=0-9"})
    check(f"{store} hit", "detail=memory" in headers.get("cache-status", ""), headers)
    etag = headers.get("etag")
    if etag:
        check(f"{store} 304", get(base, store, "plain", {"If-None-Match": etag})[0] == 304, etag)


def main():
    lines = ['[log]', 'format = "json"', '[memory]', 'limit = "256MiB"']
    for name, fill in (("s3", fill_s3), ("az", fill_az)):
        url, options = fill(free_port())
        lines += [f"[stores.{name}]", f'url = "{url}"', f"[stores.{name}.options]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    with open(f"{HOME}/halfopen.toml", "w") as file:
        file.write("\n".join(lines) + "\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "AZURE_", "GOOGLE_"))}
    checked = subprocess.run(["target/debug/halfopen", "check", "--config", f"{HOME}/halfopen.toml"], env=environment,
                             capture_output=True, text=True)
    print(checked.stdout, checked.stderr)
    check("halfopen check", checked.returncode == 0, checked.returncode)
    port, admin = free_port(), free_port()
    environment.update(HALFOPEN_LISTEN=f"127.0.0.1:{port}", HALFOPEN_ADMIN_LISTEN=f"127.0.0.1:{admin}")
    start(port, "target/debug/halfopen", "serve", "--config", f"{HOME}/halfopen.toml", **environment)
    for store in ("s3", "az"):
        check_store(f"http://127.0.0.1:{port}", store)


try:
    main()
finally:
    for process in reversed(processes):
        process.terminate()
print(f"{passed} passed, {len(failures)} failed")
sys.exit(1 if failures else 0)
