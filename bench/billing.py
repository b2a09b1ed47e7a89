"""Bills and exports of a large ledger on PostgreSQL: is it fast, and is it exact?

    python -m bench.billing serve [--rows 10000000]    a server of its own, filled; prints its URL
                                                       and runs until it is ended
    python -m bench.billing measure URL [--output FILE] [--only PART]

The ledger has 1,000 tenants (three in ten on a plan), 5,000 keys and three models, a month of
postings whose rows lie as they came, so a tenant's are all over the table. Measured: a tenant's
monthly bill (`invoices preview`, tenants at random: first time and again), `polyhost usage export`
of a span of a million rows in each format as a process of its own (wall time, its peak memory),
a check of one bill by bench/billing_check.py and of one export by `usage verify`, and postings a
second in the ledger's own batches into the full table.
"""

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine, text

from admin.context.operator_context import OperatorContext
from admin.operations import invoices as service_invoices
from admin.operations.invoices import month_of
from bench import billing_check
from bench.machine import facts
from bench.processes import peak_bytes
from registry.money import ledger, plans, prices
from registry.money.ledger import Posting
from registry.money.plans import PlanDiscount, TenantTerms
from registry.money.prices import PriceRecord
from registry.schema import upgrade
from registry.session import appending, make_engine, writing
from tests.postgres import own_server

MONTH = "2026-10"
BEGAN_AT = datetime(2026, 10, 1, tzinfo=UTC).timestamp()
SPAN_S = 31 * 86_400
NUM_TENANTS = 1000
EXPORT_ROWS = 1_000_000
NUM_BILLS = 40
BATCH = 500
SERVER = {
    "fsync": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "8GB",
}
LISTED = {"model-0": (150, 15, 600), "model-1": (2500, 250, 10_000), "model-2": (50, 5, 120)}
DISCOUNT_BP = 1250
# As gateway/pricing/policy/pricing.py rounds: sums so far, each rounded down; the parts are
# differences.
FILL = """
INSERT INTO postings (request_id, tenant_id, tenant_name, key_id, key_name, model, revision, kind,
  outcome, prompt_tokens, cached_tokens, completion_tokens, cost_nanos, service_s, queue_s, ttft_s,
  duration_s, posted_at, arrived_at, prefill_s, decode_s, load_s, input_nanos, cached_nanos,
  output_nanos, service_nanos, load_nanos, list_nanos, corrects)
SELECT 'chatcmpl-' || lpad(to_hex(i), 32, '0'), 'ten_' || t, 'tenant ' || t,
  'key_' || t || '_' || k, 'key ' || k, model, '4bf92f3577b34da6a3ce929d0e0e4736', 'chat',
  'finished', p, c, o, cd / 100000000, 0.73125, 0.0123, 0.1875, 2.40625, at, at - 2.40625,
  0.12, 0.6, 0, a / 100000000, ac / 100000000 - a / 100000000,
  cd / 100000000 - ac / 100000000, 0, 0, l, ''
FROM (
  SELECT *, a + c * pc * share AS ac, a + (c * pc + o * po) * share AS cd,
    (p - c) * pp + c * pc + o * po AS l
  FROM (
    SELECT *, (p - c) * pp * share AS a
    FROM (
      SELECT i, (i * 7919) % {tenants} AS t, (i / 7) % 5 AS k, 'model-' || i % 3 AS model,
        100 + (i * 7919) % 4000 AS p, ((100 + (i * 7919) % 4000) / 4) * (i % 3) AS c,
        1 + (i * 104729) % 800 AS o, {began} + i * {step}::float8 AS at,
        (ARRAY[150, 2500, 50])[i % 3 + 1]::bigint AS pp,
        (ARRAY[15, 250, 5])[i % 3 + 1]::bigint AS pc,
        (ARRAY[600, 10000, 120])[i % 3 + 1]::bigint AS po,
        CASE WHEN (i * 7919) % {tenants} % 10 < 3 THEN {share} ELSE 100000000 END AS share
      FROM generate_series({first}::bigint, {last}::bigint) AS i
    ) AS drawn
  ) AS fresh
) AS priced
"""
INDEXES = """
SELECT indexdef FROM pg_indexes WHERE tablename = 'postings' AND indexdef NOT LIKE '%UNIQUE%'
"""
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
    tenant = number % 100
    return replace(
        POSTING,
        request_id=f"chatcmpl-{number:032x}",
        tenant_id=f"ten_k3vq7xw2m5p4z{tenant:03}",
        key_id=f"key_k3vq7xw2m5p4z{tenant:03}",
        model=f"acme/model-{number % 3}",
        posted_at=posted_at,
    )


def fill(engine: Engine, num_rows: int) -> None:
    """Tenants, keys, prices, a plan, and a month of postings."""
    with writing(engine, "bench") as session:
        session.execute(
            text(
                "INSERT INTO tenants (id, name, weight, disabled, created_at) "
                f"SELECT 'ten_' || t, 'tenant ' || t, 1, false, 0 FROM "
                f"generate_series(0, {NUM_TENANTS - 1}) AS t"
            )
        )
        for model, listed in LISTED.items():
            prices.set_price(session, PriceRecord(model, 0.0, *listed), now_at=0.0)
        plans.create_plan(session, PlanDiscount("partner", 0.0, DISCOUNT_BP), now_at=0.0)
        for tenant in range(NUM_TENANTS):
            if tenant % 10 < 3:
                terms = TenantTerms(f"ten_{tenant}", 0.0, "partner", 0)
                plans.set_terms(session, terms, now_at=0.0)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        indexes = [row[0] for row in connection.execute(text(INDEXES))]
        for definition in indexes:
            connection.execute(text(f"DROP INDEX {definition.split()[2]}"))
        share = (10_000 - DISCOUNT_BP) * 10_000
        for first in range(0, num_rows, 1_000_000):
            values = {"tenants": NUM_TENANTS, "began": BEGAN_AT, "share": share, "first": first}
            last = min(num_rows, first + 1_000_000) - 1
            query = FILL.format(**values, step=SPAN_S / num_rows, last=last)
            connection.exec_driver_sql(query.replace("%", "%%"))
            print(f"{last + 1} rows", file=sys.stderr, flush=True)
        for definition in indexes:
            connection.execute(text(definition))
        connection.execute(text("VACUUM ANALYZE postings"))


def serve(num_rows: int) -> int:
    """Until SIGTERM or SIGINT."""
    with own_server(SERVER) as server:
        url = server.url("postgres")
        upgrade(url)
        engine = make_engine(url)
        began_s = time.monotonic()
        fill(engine, num_rows)
        engine.dispose()
        print(f"filled in {time.monotonic() - began_s:.0f} s", file=sys.stderr)
        print(url, flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


def bills(engine: Engine, url: str, folder: Path) -> dict[str, object]:
    """Seconds for a tenant's month, and whether it agrees with the independent recomputation."""
    context = OperatorContext(engine, folder, "bench")
    draw = random.Random(3)
    names = [f"tenant {draw.randrange(NUM_TENANTS)}" for _ in range(NUM_BILLS)]
    first: list[float] = []
    again: list[float] = []
    for name in names:
        for times in (first, again):
            began_s = time.perf_counter()
            document = service_invoices.preview_invoice(context, name, month_of(MONTH))
            times.append(time.perf_counter() - began_s)
    path = folder / "bill.json"
    path.write_text(json.dumps(asdict(document)))
    checked = billing_check.main(
        [url, "--tenant", names[-1], "--month", MONTH, "--bill", str(path)]
    )
    return {
        "postings_in_a_bill": document.num_postings,
        "first_s": spread(first),
        "again_s": spread(again),
        "agrees_to_the_unit": checked == 0,
    }


def exported(url: str, folder: Path, form: str, num_rows: int) -> dict[str, object]:
    """`polyhost usage export` of the span that has EXPORT_ROWS, as a process."""
    to_at = BEGAN_AT + EXPORT_ROWS * SPAN_S / num_rows
    path = folder / f"usage.{form}"
    span = ("--from", f"{MONTH}-01", "--to", datetime.fromtimestamp(to_at, UTC).isoformat())
    command = ["usage", "export", *span, "--format", form, "--output", str(path)]
    took_s, peak = ran(url, folder, *command)
    verified_s, _ = ran(url, folder, "usage", "verify", str(path))
    proof = json.loads(path.with_name(path.name + ".proof.json").read_text())
    return {
        "num_rows": proof["num_rows"],
        "cost_nanos": proof["cost_nanos"],
        "size_mb": round(path.stat().st_size / 1e6, 1),
        "wall_s": round(took_s, 2),
        "peak_mb": round(peak, 1),
        "verify_s": round(verified_s, 2),
    }


def ran(url: str, folder: Path, *arguments: str) -> tuple[float, float]:
    """Seconds and peak MB of a command that must do."""
    environment = {**os.environ, "POLYHOST_DATABASE_URL": url}
    command = [sys.executable, "-m", "gateway", *arguments, "--data-dir", str(folder)]
    began_s = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0, arguments
    return time.perf_counter() - began_s, peak / 2**20


def posted(engine: Engine, number: int) -> dict[str, object]:
    """Postings a second into the full table, by one writer in batches of the ledger's size."""
    now_at = BEGAN_AT + SPAN_S + 1
    made = [
        replace(posting_of(n, now_at), request_id=f"more-{os.getpid()}-{n}") for n in range(number)
    ]
    used_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    began_s = time.perf_counter()
    for first in range(0, number, BATCH):
        with appending(engine, "bench") as session:
            ledger.post_many(session, made[first : first + BATCH])
    took_s = time.perf_counter() - began_s
    used_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - used_s
    return {"postings_s": round(number / took_s), "cpu_ms_each": round(used_s / number * 1e3, 3)}


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and worst."""
    return {"median": round(statistics.median(times), 4), "max": round(max(times), 4)}


def measure(url: str, parts: Sequence[str]) -> dict[str, object]:
    """What is asked for, in turn."""
    engine = make_engine(url)
    with engine.connect() as connection:
        query = text("SELECT count(*) FROM postings WHERE posted_at < :ended")
        counted = connection.execute(query, {"ended": BEGAN_AT + SPAN_S})
        num_rows = int(counted.scalar() or 0)
    result: dict[str, object] = {"num_postings": num_rows, "machine": facts()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work: dict[str, Callable[[], dict[str, object]]] = {
            "bills": lambda: bills(engine, url, folder),
            **{
                form: lambda form=form: exported(url, folder, form, num_rows)  # type: ignore[misc]
                for form in ("csv", "jsonl", "parquet", "focus")
            },
            "posted": lambda: posted(engine, 50_000),
        }
        for part in parts or work:
            result[part] = work[part]()
            print(part, json.dumps(result[part]), file=sys.stderr, flush=True)
    engine.dispose()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve")
    serving.add_argument("--rows", type=int, default=10_000_000)
    measuring = commands.add_parser("measure")
    measuring.add_argument("url")
    measuring.add_argument("--only", action="append", default=[], metavar="PART")
    measuring.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if options.command == "serve":
        return serve(options.rows)
    result = measure(options.url, options.only)
    told = json.dumps(result, indent=2) + "\n"
    if options.output is None:
        print(told)
        return 0
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps({**before, **result}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
