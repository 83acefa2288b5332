"""Runs one scenario: store, server in a cgroup, k6; leaves a summary and a picture of resident memory over time.

Called by load/run. Exit status 0 when every threshold held, in every scenario that was asked for.
"""
import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = pathlib.Path(__file__).parent
BIN = HERE.parent / "target/release"
MIB = 1 << 20
SAMPLE_SECONDS = 0.2
CGROUP_1, CGROUP_2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")
DISK_WRITE_RATE = 20_000_000


@dataclasses.dataclass
class Scenario:
    """What a scenario needs: seconds whole and short, the store's latency (ms), what is started beside k6."""

    seconds: int
    short: int
    latency: int = 0
    disk: bool = False
    slow_readers: int = 0
    refill: bool = False
    slow_disk: bool = False
    level: bool = False
    environment: dict = dataclasses.field(default_factory=dict)
    short_environment: dict = dataclasses.field(default_factory=dict)


SCENARIOS = {
    "memory_mixed": Scenario(90, 15),
    "memory_slow_readers": Scenario(90, 40, slow_readers=200),
    "memory_misses": Scenario(90, 50, latency=2000),
    "memory_tiny": Scenario(1200, 15, short_environment={"RANGES": "60000"}),
    "memory_disk_slow": Scenario(90, 15, disk=True, slow_disk=True),
    "memory_restart": Scenario(60, 12, disk=True, refill=True),
    "memory_plateau": Scenario(1800, 30, level=True),
}


def size(text):
    number, unit = re.fullmatch(r"(\d+)\s*([KMG]iB)?", text).groups()
    return int(number) << {None: 0, "KiB": 10, "MiB": 20, "GiB": 30}[unit]


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read()


class Cgroup:
    """A memory cgroup of its own, where this user may make one; without it the peak alone is looked at."""

    def __init__(self, limit):
        name = f"halfopen-load-{os.getpid()}"
        self.limit, self.path = limit, None
        for root, file, events in (CGROUP_1, "memory.limit_in_bytes", "memory.oom_control"), (CGROUP_2, "memory.max", "memory.events"):
            with contextlib.suppress(OSError):
                (root / name).mkdir()
                (root / name / file).write_text(str(limit))
                self.path, self.events = root / name, root / name / events
                break

    def join(self):
        if self.path:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self):
        if not self.path:
            return 0
        found = re.search(r"^oom_kill (\d+)", self.events.read_text(), re.M)
        return int(found.group(1)) if found else 0

    def peak(self):
        for file in "memory.max_usage_in_bytes", "memory.peak":
            with contextlib.suppress(OSError, TypeError):
                return int((self.path / file).read_text())
        return None

    def remove(self):
        if self.path:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def throttle_writes(path):
    """Bounds direct writes of the server's cgroup to the disk below `path`; says what it did."""
    device = os.stat(path).st_dev
    group = pathlib.Path("/sys/fs/cgroup/blkio") / f"halfopen-load-{os.getpid()}"
    try:
        group.mkdir(exist_ok=True)
        (group / "blkio.throttle.write_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {DISK_WRITE_RATE}")
        return group
    except OSError:
        return None


class Server:
    def __init__(self, store, limit, out, disk, switch_off, extra):
        self.data, self.admin = free_port(), free_port()
        self.command = [
            str(BIN / "halfopen"), "serve", "--config", str(out / "halfopen.toml"),
            "--listen", f"127.0.0.1:{self.data}", "--admin-listen", f"127.0.0.1:{self.admin}",
        ]
        lines = [
            "[memory]", f"limit = {limit}", *([f'switch_off = "{switch_off}"'] if switch_off else []), *extra,
            "[stores.s]", 'url = "s3://bucket"', 'freshness = "immutable"',
            "[stores.s.options]", f'aws_endpoint = "http://127.0.0.1:{store}"', "aws_allow_http = true",
            "aws_skip_signature = true", 'aws_region = "x"',
        ]
        if disk:
            lines += ["[disk]", f'path = "{disk}"', 'capacity = "2GiB"', "allow_tmpfs = true"]
        (out / "halfopen.toml").write_text("\n".join(lines) + "\n")
        self.out, self.limit = out, limit
        checked = subprocess.run([*self.command[:1], "check", *self.command[2:4]], capture_output=True, text=True)
        needs = re.search(r"cgroup\s+at least (\d+) bytes", checked.stdout)
        self.cgroup = Cgroup(int(needs.group(1)) if needs else limit + 64 * MIB)
        self.blkio, self.process = None, None

    def join_groups(self):
        self.cgroup.join()
        if self.blkio:
            (self.blkio / "cgroup.procs").write_text(str(os.getpid()))

    def start(self):
        log = open(self.out / "server.log", "a")
        self.process = subprocess.Popen(self.command, stderr=log, preexec_fn=self.join_groups)
        for _ in range(600):
            with contextlib.suppress(OSError):
                get(f"http://127.0.0.1:{self.admin}/readyz")
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        sys.exit(f"the server does not start: {(self.out / 'server.log').read_text()[-2000:]}")

    def memory(self):
        return json.loads(get(f"http://127.0.0.1:{self.admin}/debug/memory"))

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode if self.process else None


class Sampler(threading.Thread):
    """Samples /debug/memory until it is told to stop."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.samples, self.ended = server, [], threading.Event()

    def run(self):
        begun = time.monotonic()
        while not self.ended.wait(SAMPLE_SECONDS):
            with contextlib.suppress(OSError, ValueError):
                self.samples.append((time.monotonic() - begun, self.server.memory()))

    def stop(self):
        self.ended.set()
        self.join()


class SlowReaders(threading.Thread):
    """Clients that each ask for a whole object and read 1 KiB a second of it; one that is cut off comes again."""

    def __init__(self, port, count):
        super().__init__(daemon=True)
        self.port, self.count, self.ended, self.cut = port, count, threading.Event(), 0

    def connect(self, n):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(f"GET /s/size-67108864/slow-{n} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        sock.setblocking(False)
        return sock

    def run(self):
        socks = {}
        while not self.ended.wait(1):
            for n in range(self.count):
                try:
                    socks[n] = socks.get(n) or self.connect(n)
                    if not socks[n].recv(1024):
                        raise ConnectionResetError
                except BlockingIOError:
                    pass
                except OSError:
                    if n in socks:
                        socks.pop(n).close()
                        self.cut += 1
        for sock in socks.values():
            sock.close()

    def stop(self):
        self.ended.set()
        self.join()


def run_k6(name, server, seconds, environment, out):
    variables = {
        "DATA": f"http://127.0.0.1:{server.data}", "ADMIN": f"http://127.0.0.1:{server.admin}",
        "LIMIT": str(server.limit), "SECONDS": str(seconds), **environment,
    }
    command = ["k6", "run", "--quiet", "--no-usage-report", "--summary-export", str(out / "k6.json"), str(HERE / f"{name}.js")]
    with open(out / "k6.log", "w") as log:
        ended = subprocess.run(command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT)
    return ended.returncode


def slope(samples):
    """Bytes a second by which resident memory grows over the last two thirds (least squares)."""
    points = [(at, memory["process"]["rss_bytes"]) for at, memory in samples[len(samples) // 3:]]
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    over = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / over if over else 0.0


def draw(name, limit, samples, path):
    """Resident memory and its parts against the limit, over the terms of the sum."""
    times = [at for at, _ in samples]
    series = {
        "limit": [limit for _ in samples],
        "RSS": [memory["process"]["rss_bytes"] for _, memory in samples],
        "allocated": [memory["allocator"]["allocated_bytes"] for _, memory in samples],
        **{
            part: [memory["buffers"][f"{part}_bytes"] for _, memory in samples]
            for part in ("cached", "filling", "pinned", "disk_queue")
        },
        "cache capacity": [memory["cache"]["capacity_bytes"] for _, memory in samples],
    }
    figure, (over_time, terms) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(4, 1))
    for label, values in series.items():
        over_time.plot(times, [value / MIB for value in values], label=label, linestyle="--" if label == "limit" else "-")
    over_time.set(xlabel="seconds", ylabel="MiB", title=f"{name}, limit {limit // MIB} MiB", ylim=(0, None))
    over_time.legend(loc="lower right", fontsize="small")
    bottom = 0
    for term, value in samples[-1][1]["sum"].items():
        terms.bar(["sum"], [value / MIB], bottom=bottom, label=term.removesuffix("_bytes"))
        bottom += value / MIB
    terms.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def run(name, arguments):
    scenario, limit = SCENARIOS[name], size(arguments.limit)
    seconds = arguments.seconds or (scenario.short if arguments.short else scenario.seconds)
    out = pathlib.Path(arguments.out) / f"{name}-{arguments.limit}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    store_port = free_port()
    store = subprocess.Popen([str(BIN / "store"), f"127.0.0.1:{store_port}", str(scenario.latency)])
    disk = tempfile.mkdtemp(prefix="disk-", dir=out.resolve()) if scenario.disk else None
    server = Server(store_port, limit, out, disk, arguments.switch_off, arguments.memory)
    slow, throttled = None, None
    try:
        if scenario.slow_disk:
            server.blkio = throttle_writes(disk)
            throttled = server.blkio is not None
        server.start()
        if scenario.refill:
            run_k6("memory_mixed", server, seconds, {}, out)
            server.stop()
            server.start()
        sampler = Sampler(server)
        sampler.start()
        if scenario.slow_readers:
            slow = SlowReaders(server.data, scenario.slow_readers)
            slow.start()
        environment = {**scenario.environment, **(scenario.short_environment if arguments.short else {})}
        status = run_k6(name, server, seconds, environment, out)
        last = server.memory() if server.process.poll() is None else None
        sampler.stop()
        if slow:
            slow.stop()
        return conclude(name, limit, out, server, sampler.samples, last, status, slow, throttled, scenario)
    finally:
        server.stop()
        store.terminate()
        store.wait()
        server.cgroup.remove()
        if server.blkio:
            with contextlib.suppress(OSError):
                server.blkio.rmdir()
        if disk:
            shutil.rmtree(disk, ignore_errors=True)


def conclude(name, limit, out, server, samples, last, status, slow, throttled, scenario):
    metrics = json.loads((out / "k6.json").read_text())["metrics"] if (out / "k6.json").exists() else {}
    draw(name, limit, samples, out / "memory.svg")
    full = max(samples, key=lambda sample: sample[1]["buffers"]["live_bytes"])[1]
    grows = slope(samples)
    summary = {
        "scenario": name,
        "limit_bytes": limit,
        "k6_status": status,
        "server_alive": server.process.poll() is None,
        "peak_rss_over_limit": last and last["process"]["peak_rss_bytes"] / limit,
        "payload_over_limit_when_full": full["buffers"]["live_bytes"] / limit,
        "cached_over_limit_last": last and last["buffers"]["cached_bytes"] / limit,
        "accounted_ratio_last": last and last["accounted_ratio"],
        "states": sorted({memory["state"] for _, memory in samples}),
        "peak_pinned_bytes": max(memory["buffers"]["pinned_bytes"] for _, memory in samples),
        "slope_bytes_per_second": grows,
        "reads": metrics.get("http_reqs{name:read}", metrics.get("http_reqs", {})).get("count"),
        "refused": metrics.get("refused_reads", {}).get("count", 0),
        "failed": metrics.get("failed_reads", {}).get("count", 0),
        "wrong": metrics.get("wrong_bytes", {}).get("count", 0),
        "healthz_ms_p95": metrics.get("healthz_ms", {}).get("p(95)"),
        "healthz_ms_max": metrics.get("healthz_ms", {}).get("max"),
        "cgroup": server.cgroup.path and {
            "limit_bytes": server.cgroup.limit, "peak_bytes": server.cgroup.peak(), "oom_kills": server.cgroup.kills(),
        },
        "slow_readers_cut": slow and slow.cut,
        "disk_throttled": throttled,
        "sum": last and last["sum"],
        "memory": last,
    }
    # Level: over a run of half an hour less than a thousandth of the limit a minute, that is noise.
    level = not scenario.level or grows * 60 < limit / 1000 or len(samples) * SAMPLE_SECONDS < 600
    summary["held"] = bool(
        status == 0 and summary["server_alive"] and last and summary["peak_rss_over_limit"] <= 1
        and server.cgroup.kills() == 0 and level
    )
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    shown = {key: value for key, value in summary.items() if key not in ("memory", "sum", "limit_bytes")}
    print(json.dumps(shown), flush=True)
    return summary["held"]


def main():
    parser = argparse.ArgumentParser(prog="load/run")
    parser.add_argument("scenario", choices=[*SCENARIOS, "all"])
    parser.add_argument("--limit", default="256MiB")
    parser.add_argument("--short", action="store_true", help="seconds rather than minutes")
    parser.add_argument("--seconds", type=int, help="this long instead")
    parser.add_argument("--out", default=str(HERE / "out"))
    parser.add_argument("--switch-off", default="", help="memory.switch_off: measures left out")
    parser.add_argument("--memory", action="append", default=[], help="a further line of the section [memory]")
    arguments = parser.parse_args()
    names = list(SCENARIOS) if arguments.scenario == "all" else [arguments.scenario]
    sys.exit(0 if all([run(name, arguments) for name in names]) else 1)


main()
