"""What the ledger takes and what it costs, on SQLite and on a PostgreSQL of its own.

    python -m bench.ledger fill     a journal of postings into the database: postings a second
    python -m bench.ledger request  open and post of many requests at once: requests a second, and
                                    CPU a request, of the loop's thread and of the ledger's two
    python -m bench.ledger outage   requests at a steady rate while the database is stopped: who
                                    failed, the lag, how long it took to drain

PostgreSQL runs with fsync on, from the dev extra's binaries (tests/postgres.py). A posting is one
of a real size; requests are of 100 tenants, three models, in the open for a millisecond or so.
"""

import argparse
import asyncio
import json
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Engine, func, select

from gateway.errors import ApiError
from gateway.ledger.ledger import Ledger
from gateway.policy.pricing import FREE
from gateway.settings import Settings
from registry import ledger as tables
from registry.ledger import OpenRecord, Posting, PostingRow
from registry.session import make_engine, reading, upgrade
from tests.postgres import own_server

NUM_TENANTS = 100
POSTING = Posting(
    request_id="",
    tenant_id="",
    key_id="",
    model="",
    revision="4bf92f3577b34da6a3ce929d0e0e4736",
    kind="chat",
    outcome="finished",
    prompt_tokens=412,
    cached_tokens=64,
    completion_tokens=187,
    cost_nanos=1_234_567_890,
    service_s=0.73125,
    queue_s=0.0123,
    ttft_s=0.1875,
    duration_s=2.40625,
    posted_at=1_790_000_000.5,
    arrived_at=1_789_999_998.25,
    prefill_s=0.12,
    decode_s=0.6,
    input_nanos=1_000_000_000,
    output_nanos=234_567_890,
    list_nanos=1_234_567_890,
)


def posting_of(number: int, posted_at: float) -> Posting:
    """One like another, of some tenant."""
    tenant = number % NUM_TENANTS
    return replace(
        POSTING,
        request_id=f"chatcmpl-{number:032x}",
        tenant_id=f"ten_k3vq7xw2m5p4z{tenant:03}",
        key_id=f"key_k3vq7xw2m5p4z{tenant:03}",
        model=f"acme/model-{number % 3}",
        posted_at=posted_at,
    )


def record_of(posting: Posting) -> OpenRecord:
    """What was opened for it."""
    return OpenRecord(
        *(posting.request_id, posting.tenant_id, posting.key_id, posting.model, posting.revision),
        posting.prompt_tokens,
        posting.arrived_at,
        reserved_nanos=2_000_000_000,
    )


@dataclass(frozen=True, slots=True)
class Database:
    """One to write into; `away` makes it unreachable, `back` ends that."""

    name: str
    engine: Engine
    away: Callable[[], None]
    back: Callable[[], None]


@contextmanager
def databases(names: list[str], folder: Path) -> Iterator[Database]:
    """Each in turn would need a loop outside: one name at a time."""
    (name,) = names
    if name == "sqlite":
        path = folder / "polyhost.db"
        upgrade(f"sqlite:///{path}")
        engine = make_engine(f"sqlite:///{path}")
        blocker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        yield Database(
            name,
            engine,
            lambda: blocker.execute("BEGIN IMMEDIATE").close(),
            lambda: blocker.execute("ROLLBACK").close(),
        )
        blocker.close()
        engine.dispose()
        return
    with own_server({"fsync": "on", "full_page_writes": "on"}) as server:
        url = server.url("postgres")
        upgrade(url)
        engine = make_engine(url)
        yield Database(name, engine, server.stop, server.start)
        engine.dispose()


def ledger_on(database: Database, folder: Path, **settings: object) -> Ledger:
    """With the defaults of a server."""
    chosen = Settings(data_dir=str(folder), **settings)  # type: ignore[arg-type]
    return Ledger(database.engine, chosen, lambda *_: FREE, lambda ids: None)


def num_posted(database: Database) -> int:
    """Postings that are there."""
    with reading(database.engine) as session:
        return session.scalar(select(func.count()).select_from(PostingRow)) or 0


async def fill(database: Database, folder: Path, number: int) -> dict[str, object]:
    """The database is away while they are posted; then the clock runs."""
    ledger = ledger_on(database, folder, ledger_rollup_interval_s=1.0)
    await ledger.start()
    database.away()
    now_at = time.time()
    for begin in range(0, number, 5000):
        batch = [posting_of(n, now_at) for n in range(begin, begin + 5000)]
        await asyncio.gather(*(ledger.post(posting) for posting in batch))
    database.back()
    await asyncio.sleep(0)
    first = num_posted(database)
    while not first:
        await asyncio.sleep(0.02)
        first = num_posted(database)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    await ledger.written()
    took_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - cpu_s
    assert num_posted(database) == number
    await ledger.stop(60.0)
    return {
        "postings": number - first,
        "seconds": round(took_s, 2),
        "postings_per_s": round((number - first) / took_s),
        "gateway_cpu_us_per_posting": round(cpu_s / (number - first) * 1e6, 1),
    }


def threads_cpu_s() -> dict[str, float]:
    """CPU of this process' threads by name, from /proc."""
    found = {}
    for thread in threading.enumerate():
        path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        found[thread.name] = int(path.read_text().split()[0]) / 1e9
    return found


async def request(database: Database, folder: Path, number: int, width: int) -> dict[str, object]:
    """`width` requests at a time open and post."""
    ledger = ledger_on(database, folder)
    await ledger.start()
    numbers = iter(range(number))

    async def client() -> None:
        for n in numbers:
            posting = posting_of(n, time.time())
            await ledger.open(record_of(posting))
            await ledger.post(posting)

    before, began_s = threads_cpu_s(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(width)))
    took_s = time.perf_counter() - began_s
    await ledger.written()
    drained_s = time.perf_counter() - began_s - took_s
    after = threads_cpu_s()
    assert num_posted(database) == number
    await ledger.stop(60.0)
    return {
        "requests": number,
        "at_a_time": width,
        "requests_per_s": round(number / took_s),
        "drained_after_s": round(drained_s, 2),
        "cpu_us_per_request": {
            name: round((cpu_s - before.get(name, 0.0)) / number * 1e6, 1)
            for name, cpu_s in after.items()
            if cpu_s - before.get(name, 0.0) > 1e-3
        },
    }


async def outage(
    database: Database, folder: Path, rate: float, outage_s: float
) -> dict[str, object]:
    """The database is away in the middle of the run."""
    ledger = ledger_on(database, folder)
    await ledger.start()
    failed: list[str] = []
    waits_s: list[float] = []
    running: set[asyncio.Task[None]] = set()
    posted = 0

    async def one(number: int) -> None:
        nonlocal posted
        posting = posting_of(number, time.time())
        began_s = time.perf_counter()
        try:
            await ledger.open(record_of(posting))
            await asyncio.sleep(0.05)
            await ledger.post(posting)
            posted += 1
        except (ApiError, ValueError) as error:
            failed.append(str(error))
        waits_s.append(time.perf_counter() - began_s - 0.05)

    began_s = time.perf_counter()
    length_s = outage_s + 10.0
    number, is_away, worst_lag_s, pending = 0, False, 0.0, 0
    while (now_s := time.perf_counter() - began_s) < length_s:
        if not is_away and 5.0 <= now_s < 5.0 + outage_s:
            is_away = True
            database.away()
        if is_away and now_s >= 5.0 + outage_s:
            is_away = False
            back_s = time.perf_counter()
            database.back()  # In this thread: PostgreSQL ends with the thread that started it.
        snapshot = ledger.snapshot()
        worst_lag_s, pending = max(worst_lag_s, snapshot.lag_s), max(pending, snapshot.num_pending)
        while number < now_s * rate:
            task = asyncio.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
        await asyncio.sleep(0.01)
    await asyncio.gather(*running)
    while ledger.snapshot().lag_s > 1.0:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    drained_s = time.perf_counter() - back_s
    await ledger.written()
    with reading(database.engine) as session:
        tables.check_integrity(session)
    waits_s.sort()
    assert num_posted(database) == posted
    await ledger.stop(60.0)
    return {
        "requests": number,
        "failed": len(failed),
        "posted": posted,
        "lag_s_at_most": round(worst_lag_s, 1),
        "records_behind_at_most": pending,
        "lag_below_a_second_after_s": round(drained_s, 2),
        "ledger_wait_ms_p50_p99": [
            round(waits_s[len(waits_s) * share // 100] * 1e3, 1) for share in (50, 99)
        ],
    }


def main() -> None:
    """One JSON line a database."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("fill", "request", "outage"))
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    parser.add_argument("--number", type=int, default=50_000, help="requests")
    parser.add_argument("--at-a-time", type=int, default=200)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second of an outage")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the outage")
    parser.add_argument("--folder", type=Path, help="for the journal and SQLite; (a temporary one)")
    options = parser.parse_args()
    for name in options.database or ("sqlite", "postgresql"):
        with (
            tempfile.TemporaryDirectory(dir=options.folder) as folder,
            databases([name], Path(folder)) as database,
        ):
            where = Path(folder)
            if options.what == "fill":
                result = asyncio.run(fill(database, where, options.number))
            elif options.what == "request":
                run = request(database, where, options.number, options.at_a_time)
                result = asyncio.run(run)
            else:
                result = asyncio.run(outage(database, where, options.rate, options.seconds))
        print(json.dumps({"database": name, "what": options.what, **result}), flush=True)


if __name__ == "__main__":
    main()
