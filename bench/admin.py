"""The operator's pages over a large registry: bytes over the wire, and the server's time a page.

    python -m bench.admin [--models 10000] [--keys 10000] [--postings 1000000] [--rounds 15]
                          [--data DIR] [--output FILE]

Fills a data folder of its own (or goes on with --data where it is filled already), starts the
product's server on it, signs in as an owner, and asks each page again and again, compressed as a
browser asks. Prints for each page the bytes of a first visit (the page and all it brings), the time
from the request to the last byte, median and worst, and the processor's time that it took the
server; of a live page's stream all of that up to its first tick. The goals: 150 kB and 300 ms.
Filling takes a minute and more: --only-fill does it beforehand, for a run that must be short.
"""

import argparse
import gzip
import http.client
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.parse
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import insert, text

from bench.machine import facts
from bench.processes import ServerProcess, exit_on_sigterm, free_port
from registry import api_keys, rollups, tenants
from registry.base import new_id, random_token
from registry.catalog import Model
from registry.prices import Price
from registry.session import make_engine, upgrade, writing

PASSWORD = "the bench's own password"
KEYS_A_TENANT = 10
SPAN_S = 30 * 86_400
MAX_BYTES = 150_000
MAX_S = 0.3
PAGES = (
    *("/account", "/models", "/models?sort=name", "/models?q=qwen&sort=-size"),
    *("/models?sort=-failed&state=ready", "/models/{model}", "/register", "/users", "/sessions"),
    *("/audit", "/audit?target={model}", "/health", "/search?q=model", "/search.json?q=12"),
    *("/tenants", "/tenants?sort=name", "/keys", "/keys?q=7&sort=-cost", "/prices", "/invoices"),
    *("/playground", "/fairness", "/cache"),
    *("/usage", "/usage?by=tenant", "/usage?by=key", "/usage?by=day&tenant=tenant-7"),
    *("/usage?{month}", "/usage?by=day&{month}", "/usage?by=tenant&{month}"),
    *("/overview", "/registrations", "/registrations?q=7&state=ready&sort=name", "/exports"),
)
STREAMS = (
    *("/live/overview", "/live/models", "/live/registrations", "/live/exports", "/live/fairness"),
    *("/live/cache", "/live/health"),
)
MONTH_DAYS = 30
_POSTINGS = """
INSERT INTO postings (
  request_id, tenant_id, tenant_name, key_id, key_name, model, revision, kind, outcome,
  prompt_tokens, cached_tokens, completion_tokens, cost_nanos, service_s, queue_s, ttft_s,
  duration_s, posted_at, arrived_at, prefill_s, decode_s, load_s, input_nanos, cached_nanos,
  output_nanos, service_nanos, load_nanos, list_nanos, corrects)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :num)
SELECT 'chatcmpl-' || printf('%032x', i), k.tenant_id, t.name, k.id, k.name,
  'org/model-' || ((i * 7919) % :models), 'rev', 'chat',
  CASE WHEN i % 97 = 0 THEN 'failed' ELSE 'finished' END,
  200 + i % 300, 0, 100 + i % 200, CASE WHEN i % 97 = 0 THEN 0 ELSE 600 END,
  0.1, 0.02, 0.2, 1.5, :began + (i * 1.0 * :span) / :num, :began + (i * 1.0 * :span) / :num,
  0.02, 0.08, 0.0, CASE WHEN i % 97 = 0 THEN 0 ELSE 600 END, 0, 0, 0, 0,
  CASE WHEN i % 97 = 0 THEN 0 ELSE 600 END, ''
FROM n JOIN api_keys k ON k.rowid = 1 + (i * 104729) % :keys
JOIN tenants t ON t.id = k.tenant_id
"""


@dataclass(frozen=True, slots=True)
class PageFigures:
    """One page: bytes of the page, bytes with all it brings, seconds; `cpu_s` is the mean of the
    server process, whatever else the machine does."""

    path: str
    page_bytes: int
    visit_bytes: int
    p50_s: float
    max_s: float
    cpu_s: float

    @property
    def holds(self) -> bool:
        """Within the goals."""
        return self.visit_bytes <= MAX_BYTES and self.p50_s <= MAX_S


def main() -> int:
    """Entry; 1 where a page is beyond the goals."""
    parser = argparse.ArgumentParser(prog="python -m bench.admin", description=__doc__)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--postings", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", type=Path, help="a data folder to keep; filled where it is empty")
    parser.add_argument("--only-fill", action="store_true", help="fill --data and end")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or Path(scratch) / "data"
        if not (data / "polyhost.db").exists():
            fill(data, options.models, options.keys, options.postings)
        if options.only_fill:
            return 0
        found = measure(data, options.rounds)
    for page in found:
        print(
            f"{page.path:42} {page.page_bytes / 1000:7.1f} kB, first visit "
            f"{page.visit_bytes / 1000:6.1f} kB; {1000 * page.p50_s:6.1f} ms, worst "
            f"{1000 * page.max_s:6.1f} ms, processor {1000 * page.cpu_s:6.1f} ms"
            f"{'' if page.holds else '   BEYOND THE GOAL'}"
        )
    if options.output:
        sizes = {name: getattr(options, name) for name in ("models", "keys", "postings")}
        result = {"machine": facts(), **sizes, "pages": [asdict(page) for page in found]}
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(page.holds for page in found) else 1


def fill(data: Path, num_models: int, num_keys: int, num_postings: int) -> None:
    """A registry of that size, roll-ups included."""
    data.mkdir(parents=True, exist_ok=True)
    url = f"sqlite:///{data / 'polyhost.db'}"
    upgrade(url)
    engine = make_engine(url)
    now_at = time.time()
    with writing(engine, "bench") as session:
        session.execute(insert(Model), [_model(n, now_at) for n in range(num_models)])
        session.execute(insert(Price), [_price(n, now_at) for n in range(num_models)])
        owner = ""
        for number in range(num_keys):
            if number % KEYS_A_TENANT == 0:
                name = f"tenant-{number // KEYS_A_TENANT}"
                owner = tenants.create_tenant(session, name, now_at=now_at).id
            api_keys.create_key(session, owner, f"key-{number}", now_at=now_at)
    with writing(engine, "bench") as session:
        told = {"num": num_postings, "models": num_models, "keys": num_keys}
        began = {"began": now_at - SPAN_S, "span": SPAN_S}
        session.execute(text(_POSTINGS), {**told, **began})
    with writing(engine, "bench") as session:
        newest = rollups.newest_seq(session)
    while True:
        with writing(engine, "bench") as session:
            if not rollups.roll(session, newest):
                break
    engine.dispose()
    print(f"filled in {time.time() - now_at:.0f} s", file=sys.stderr)


def measure(data: Path, rounds: int) -> list[PageFigures]:
    """Every page, in turn."""
    port = free_port()
    command = [*(sys.executable, "-m", "gateway", "serve", "--data-dir", str(data))]
    log = data.parent / "bench-admin.log"
    environment = {"POLYHOST_ADMIN_PASSWORD": PASSWORD}
    with ServerProcess("polyhost", [*command, "--port", str(port)], log, environment) as server:
        server.wait_ready(f"http://127.0.0.1:{port}/health/ready", 120)
        client = Client(port)
        client.sign_in()
        return [
            _figures(server, client, path, rounds)
            for path in (*(_named(path) for path in PAGES), *STREAMS)
        ]


def _figures(server: ServerProcess, client: "Client", path: str, rounds: int) -> PageFigures:
    ask = client.first_tick if path in STREAMS else client.get
    ask(path)
    times, size, visit = list[float](), 0, 0
    cpu_began_s = _cpu_s(server.pid)
    for _ in range(rounds):
        began_s = time.perf_counter()
        body = ask(path)
        times.append(time.perf_counter() - began_s)
        size = client.num_bytes
        visit = max(visit, size + client.static_bytes(body))
    cpu_s = (_cpu_s(server.pid) - cpu_began_s) / rounds
    return PageFigures(path, size, visit, statistics.median(times), max(times), cpu_s)


def _named(path: str) -> str:
    month = time.strftime("from=%Y-%m-%d", time.gmtime(time.time() - (MONTH_DAYS - 1) * 86_400))
    model = urllib.parse.quote("org/model-7", safe="")
    return path.replace("{model}", model).replace("{month}", month)


def _cpu_s(pid: int) -> float:
    """What the process has used so far."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


class Client:
    """A browser's requests on one connection; the pages' static files are fetched once."""

    def __init__(self, port: int) -> None:
        self._host = f"127.0.0.1:{port}"
        self._connection = http.client.HTTPConnection(self._host, timeout=60)
        self._origin = f"http://{self._host}"
        self._cookie = ""
        self._static: dict[str, int] = {}
        self.num_bytes = 0

    def sign_in(self) -> None:
        """As the owner."""
        body = urllib.parse.urlencode({"name": "admin", "password": PASSWORD})
        headers = {
            "origin": self._origin,
            "content-type": "application/x-www-form-urlencoded",
        }
        self._connection.request("POST", "/admin/sign-in", body, headers)
        answer = self._connection.getresponse()
        answer.read()
        self._cookie = (answer.headers["set-cookie"] or "").partition(";")[0]
        if answer.status != 303:
            raise SystemExit(f"the sign-in was refused: {answer.status}")

    def get(self, path: str) -> str:
        """A page's text; `num_bytes` is what came over the wire, headers too."""
        data, status = self._fetch("/admin" + path)
        if status != 200:
            raise SystemExit(f"{path}: {status}")
        return data

    def first_tick(self, path: str) -> str:
        """A live page's parts as its stream first sends them."""
        connection = http.client.HTTPConnection(self._host, timeout=60)
        try:
            connection.request("GET", "/admin" + path, headers={"cookie": self._cookie})
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status}")
            told = b""
            while line := answer.readline():
                told += line
                if line == b"event: tick\n":
                    break
            self.num_bytes = len(told) + len(str(answer.headers))
            return ""
        finally:
            connection.close()

    def static_bytes(self, page: str) -> int:
        """All that the page brings: style, scripts and what these import, icon."""
        wanted = set(re.findall(r'(?:href|src)="(/admin/static/[^"]+)"', page))
        if not wanted:
            return 0
        folder = next(iter(wanted)).rpartition("/")[0]
        total, done = 0, set[str]()
        while wanted - done:
            name = (wanted - done).pop()
            done.add(name)
            if name not in self._static:
                kept = self.num_bytes
                data, _ = self._fetch(name)
                self._static[name] = self.num_bytes
                self.num_bytes = kept
                imports = re.findall(r'from "\./([\w-]+\.js)"', data)
                wanted |= {f"{folder}/{each}" for each in imports}
            total += self._static[name]
        return total

    def _fetch(self, path: str) -> tuple[str, int]:
        headers = {"accept-encoding": "gzip", "cookie": self._cookie}
        self._connection.request("GET", path, headers=headers)
        answer = self._connection.getresponse()
        body = answer.read()
        self.num_bytes = len(body) + len(str(answer.headers))
        if answer.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        return body.decode(), answer.status


def _model(number: int, now_at: float) -> dict[str, object]:
    return {
        "id": new_id("mdl"),
        "name": f"org/model-{number}",
        "source": f"org/model-{number}",
        "requested_dtype": "auto",
        "state": "ready",
        "registration": random_token(15),
        "revision": f"rev-{number}",
        "pack": f"pack-{number}",
        "family": ("llama", "qwen3", "gemma")[number % 3],
        "dtype": "bfloat16",
        "weight_bytes": (1 + number % 40) << 28,
        "max_context": 8192,
        "vocab_size": 32_000,
        "pinned": False,
        "weight": 1.0,
        "created_at": now_at,
        "ready_at": now_at,
    }


def _price(number: int, now_at: float) -> dict[str, object]:
    return {
        "model": f"org/model-{number}",
        "valid_from": now_at,
        "prompt_nanos": 500,
        "cached_nanos": 50,
        "completion_nanos": 1500,
    }


if __name__ == "__main__":
    sys.exit(main())
