"""The first page: its figures, the arena's rows and bands, who may see it, what it costs."""

import asyncio
import concurrent.futures
import gzip
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from admin.context.operator_context import acting_as
from admin.live.fleet_watch import FleetWatch, LiveState, Shared, ask_fleet
from admin.live.rates import Answered, Rising, answer_counts, answered
from admin.live.residency import place
from admin.operations import server as traffic
from admin.operations.server import RATE_S, TTFT_S, may_watch, traffic_now
from admin.rendering.arena import (
    BAND_HEIGHT,
    MAX_BANDS,
    MAX_ROWS,
    MAX_SEGMENTS,
    SPAN_S,
    STATE_HEIGHT,
    arenas,
    bands,
    layout,
    strip,
)
from admin.rendering.arena import band as draw_band
from admin.rendering.model_colours import ModelColours
from gateway.dispatch.decisions import Move
from gateway.dispatch.operator_handler import FleetReport
from gateway.ipc.control_socket import listening, operator_socket
from gateway.protocols import LedgerSnapshot
from registry.accounts import tenants, users
from registry.errors import Forbidden, RegistryError
from registry.money import ledger, recent
from registry.money.ledger import Posting
from tests.admin.fleet_handler import (
    NUM_PAGES,
    PAGE,
    FleetHandler,
    eviction,
    fleet,
    group,
    model,
    queue,
    status,
    swap,
    telling,
)
from tests.admin.site import Site, running_site

AT = 1_800_000_000.0
COLOURS = ModelColours()


def posting(name: str, posted_at: float, ttft_s: float = 0.2, **fields: object) -> Posting:
    made = Posting(
        f"chatcmpl-{name}", "ten_1", "key_1", "tiny", "rev", "chat", "finished",
        12, 0, 30, 1_000_000, 1.0, 0.1, ttft_s, 1.0, posted_at,
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def handler(site: Site) -> Iterator[FleetHandler]:
    site.add_model("alpha")
    site.add_model("beta")
    with telling(site, FleetHandler(None)) as found:
        yield found


# What the picture is made of.


def test_rows_have_all_pages_and_the_largest_first() -> None:
    told = fleet(AT, status(model("alpha", running=2), model("beta"), model("cool", "warm")))
    (arena,) = arenas(told)
    assert [row.name for row in arena.rows] == ["alpha", "beta"]
    row = arena.rows[0]
    assert (row.weights, row.kv_live, row.kv_kept, row.pages) == (32, 6, 2, 40)
    assert row.kv_tokens == 6 * arena.page_bytes // (64 << 10)
    assert (row.why, row.since_at, row.num_running) == ("idle models evicted", AT - 600, 2)
    assert arena.free + sum(each.pages for each in arena.rows) == arena.num_pages == NUM_PAGES


def test_a_strip_is_to_scale_and_bounded_with_a_hundred_models() -> None:
    rows = [model(f"m{n}") for n in range(100)]
    named = status(*rows)
    pages = {f"m{n}/weights": 2 for n in range(100)} | {"free": 56}
    named = msgspec.structs.replace(named, pages=pages)
    (arena,) = arenas(fleet(AT, named))
    picture = str(strip(arena, COLOURS))
    assert picture.count("<a ") == MAX_SEGMENTS + 1
    assert "68 more models" in picture
    widths = [float(wide) for wide in re.findall(r'class="hit"[^>]* width="([0-9.]+)"', picture)]
    assert widths == pytest.approx([1000 * 2 / 256 - 1] * MAX_SEGMENTS, abs=0.01)
    assert len(picture) < 40_000


def test_names_are_inert_in_the_picture() -> None:
    evil = '"><script>alert(1)</script>'
    (arena,) = arenas(fleet(AT, status(model(evil))))
    assert "<script" not in str(strip(arena, COLOURS)) + str(layout(arena, COLOURS))


def test_a_band_is_the_hour_as_it_was() -> None:
    moves = [
        Move(AT - 4000, "worker-0", "alpha", "loading", "resident"),
        Move(AT - 1200, "worker-0", "alpha", "resident", "draining"),
        Move(AT - 1190, "worker-0", "alpha", "draining", "warm"),
        Move(AT - 600, "worker-0", "alpha", "warm", "loading"),
        Move(AT - 590, "worker-0", "alpha", "loading", "resident"),
    ]
    told = fleet(AT, status(model("alpha")), moves=moves, since_at=AT - 9000)
    (band,), num = bands(told)
    assert num == 1
    states = " ".join(stretch.state for stretch in band.stretches)
    assert states == "resident draining warm loading resident"
    assert band.stretches[0].from_s == 0.0, "it was there when the hour began"
    assert band.stretches[-1].to_s == pytest.approx(SPAN_S)
    for one, other in zip(band.stretches, band.stretches[1:], strict=False):
        assert one.to_s == other.from_s
    assert (len(band.loads), len(band.evictions)) == (1, 1)


def test_what_a_dispatcher_finds_was_not_loaded_then() -> None:
    moves = [
        Move(AT - 900, "worker-0", "alpha", "resident", "resident"),
        Move(AT - 600, "worker-0", "alpha", "resident", "cold"),
        Move(AT - 300, "worker-0", "alpha", "resident", "resident"),
    ]
    (band,), _ = bands(fleet(AT, status(model("alpha")), moves=moves, since_at=AT - 1800))
    states = [(stretch.state, stretch.to_s - stretch.from_s) for stretch in band.stretches]
    assert [state for state, _ in states] == ["cold", "resident", "cold", "resident"]
    assert states[0][1] == pytest.approx(900)
    assert (len(band.loads), len(band.evictions)) == (0, 1)


def test_what_is_beyond_the_rows_counts_in_the_sums() -> None:
    rows = [model(f"m{n:03}") for n in range(MAX_ROWS + 50)]
    pages = {f"{row.model_id}/weights": 1 for row in rows} | {"m000/kv": 3, "free": 3}
    (arena,) = arenas(fleet(AT, status(*rows, pages=pages)))
    assert (len(arena.rows), arena.num_rows) == (MAX_ROWS, MAX_ROWS + 50)
    assert arena.total("weights") == MAX_ROWS + 50
    assert arena.taken + arena.free == arena.num_pages == NUM_PAGES
    drawn = re.search(r"(\d+) more models: [^(]*\((\d+) pages\)", str(strip(arena, COLOURS)))
    assert drawn is not None
    assert int(drawn[1]) == MAX_ROWS + 50 - MAX_SEGMENTS
    assert int(drawn[2]) == arena.taken - sum(r.pages for r in arena.rows[:MAX_SEGMENTS])


def test_thrash_is_drawn_and_stays_small() -> None:
    moves = [
        Move(AT - 60 + n * 0.06 + half, "worker-0", "alpha", was, now)  # type: ignore[arg-type]
        for n in range(1000)
        for was, now, half in (("warm", "resident", 0.0), ("resident", "warm", 0.03))
    ]
    ((band, *_), _) = bands(fleet(AT, status(model("alpha", "warm")), moves=moves))
    picture = str(draw_band(band, COLOURS))
    assert "loads 1000, evictions 1000" in picture
    assert f"at most {band.most_loads} loads per minute" in picture
    assert sum(band.minutes) == 1000
    assert picture.count('class="loads often"') in (1, 2)
    shown = [float(h) for h in re.findall(r'class="fill-c\d"[^>]*height="([0-9.]+)"', picture)]
    assert max(shown) == pytest.approx(7, abs=0.5), "half of the minute on the device, not all"
    assert len(picture) < 10_000


def test_a_few_loads_do_not_cover_the_state() -> None:
    moves = [
        Move(AT - 1000 + n, "worker-0", "alpha", was, now)  # type: ignore[arg-type]
        for n, was, now in ((0, "cold", "resident"), (300, "resident", "warm"))
    ]
    ((band, *_), _) = bands(fleet(AT, status(model("alpha", "warm")), moves=moves))
    picture = str(draw_band(band, COLOURS))
    places = re.findall(
        r'class="(fill-c\d|loads)[^>]*y="([0-9.]+)"[^>]*height="([0-9.]+)"', picture
    )
    ends = {kind[:4]: float(y) + float(tall) for kind, y, tall in places}
    assert ends == {"fill": STATE_HEIGHT, "load": BAND_HEIGHT}
    assert all(float(y) >= STATE_HEIGHT for kind, y, _ in places if kind == "loads")


def test_kv_in_use_means_the_same_on_a_models_page() -> None:
    ledger_now = LedgerSnapshot(0, 0.0, 0, 0, 0, 0, 0)
    live = LiveState([status(model("alpha"))], queue(), ledger_now, True, False)
    now = place(live, "alpha")
    assert (now.kv_bytes, now.cached_kv_bytes) == (6 * PAGE, 2 * PAGE)
    twin = place(live, "twin", ["alpha", "twin"])
    assert (twin.kv_bytes, twin.cached_kv_bytes) == (6 * PAGE, 2 * PAGE)


def test_a_second_name_of_a_pack_stands_beside_the_first() -> None:
    rows = [model("alpha", running=2), model("twin", running=1)]
    pages = {"alpha/weights": 32, "alpha/kv": 6, "free": NUM_PAGES - 38}
    told = fleet(AT, status(*rows, pages=pages))
    both = ["alpha", "twin"]
    (arena,) = arenas(told, dict.fromkeys(both, both))
    (row,) = arena.rows
    assert (row.name, row.others, row.num_running) == ("alpha", ("twin",), 3)
    assert "alpha (also twin): resident" in str(strip(arena, COLOURS))


def test_what_nobody_watched_is_not_made_up() -> None:
    told = fleet(AT, status(model("alpha")), moves=[], since_at=AT - 100)
    (band,), _ = bands(told)
    assert band.known_s == pytest.approx(SPAN_S - 100)
    assert band.stretches[0].from_s == band.known_s


def test_bands_are_of_what_was_on_a_device_and_bounded() -> None:
    rows = [model(f"m{n:03}") for n in range(100)]
    moves = [
        Move(AT - 60, "worker-0", "gone", "resident", "warm"),
        Move(AT - 60, "worker-0", "fetched", "cold", "warm"),
    ]
    made, num = bands(fleet(AT, status(*rows), moves=[*moves, moves[0]]))
    assert (len(made), num) == (MAX_BANDS, 101)
    assert [band.model for band in made] == [*(f"m{n:03}" for n in range(15)), "gone"]
    made, _ = bands(fleet(AT, status(), moves=moves))
    assert [(band.model, band.state) for band in made] == [("gone", "cold")]


# Rates and what is shared.


def test_rates_are_of_the_last_while() -> None:
    rising = Rising(10.0)
    assert rising.since(0.0, {"a": 100.0}) == (0.0, {})
    assert rising.since(5.0, {"a": 110.0}) == (5.0, {"a": 10.0})
    assert rising.since(12.0, {"a": 120.0, "b": 3.0}) == (12.0, {"a": 20.0, "b": 3.0})
    span_s, added = rising.since(16.0, {"a": 5.0, "b": 3.0})
    assert (span_s, added) == (11.0, {"a": 15.0, "b": 3.0}), "one that fell began anew"
    assert rising.since(500.0, {"a": 6.0}) == (0.0, {}), "nobody looked for long"


def test_a_worker_that_comes_back_did_not_do_all_its_work_just_now() -> None:
    rising = Rising(10.0, from_zero=False)
    rising.since(0.0, {})
    assert rising.since(1.0, {"old": 1e6}) == (1.0, {"old": 0.0}), "how much before is not known"
    rising.since(2.0, {})
    assert rising.since(3.0, {"old": 1e6 + 30.0}) == (3.0, {"old": 30.0})
    assert rising.since(-3600.0, {"old": 1e6 + 40.0}) == (0.0, {}), "the clock was set back"
    assert rising.since(-3599.0, {"old": 1e6 + 45.0}) == (1.0, {"old": 5.0})


def test_answers_are_failed_by_us_or_refused() -> None:
    sums = {
        "ended/finished": 90.0, "ended/failed": 2.0, "ended/void": 8.0,
        "error/service_unavailable": 3.0, "error/rate_limit_exceeded": 5.0,
    }  # fmt: skip
    assert answered(sums, 60.0) == Answered(100, 5, 5, 60.0)
    assert answered({}, None).failed_share == 0.0


async def test_counts_come_from_the_metrics_of_all_processes(site: Site) -> None:
    text = (
        b'polyhost_requests_ended_total{model_name="a\\"}b",outcome="finished"} 7.0\n'
        b'polyhost_requests_ended_total{model_name="c",outcome="finished"} 1e3\n'
        b'polyhost_request_errors_total{code="queue_full"} 2.0\n'
        b'polyhost_limit_rejections_total{dimension="code"} 9.0\n'
    )

    class Edge:
        class services:
            @staticmethod
            async def scrape() -> bytes:
                return text

    found = await answer_counts(Edge())  # type: ignore[arg-type]
    assert found == {"ended/finished": 1007.0, "error/queue_full": 2.0}


def test_what_all_look_at_is_made_once_and_nobody_waits_for_a_newer_one() -> None:
    now_s, made = [0.0], []
    entered, leave = threading.Event(), threading.Event()

    def make() -> int:
        made.append(now_s[0])
        if len(made) == 2:
            entered.set()
            assert leave.wait(10)
        return len(made)

    shared = Shared(make, 1.0, lambda: now_s[0])
    assert [shared.get() for _ in range(5)] == [1] * 5
    now_s[0] = 2.0
    thread = threading.Thread(target=shared.get)
    thread.start()
    assert entered.wait(10)
    assert shared.get() == 1, "the one of before, while the next is being made"
    leave.set()
    thread.join(10)
    assert (shared.get(), made) == (2, [0.0, 2.0])


def test_what_fails_is_tried_again_by_the_next() -> None:
    answers = iter([OSError("away"), None, OSError("away")])

    def make() -> str:
        error = next(answers)
        if error is not None:
            raise error
        return "there"

    shared = Shared(make, 1.0, lambda: 0.0)
    with pytest.raises(OSError, match="away"):
        shared.get()
    assert shared.get() == "there"


def test_what_was_before_a_failure_is_not_shown_as_of_now() -> None:
    tries, trying, go = iter(range(9)), threading.Event(), threading.Event()

    def make() -> str:
        number = next(tries)
        if number == 2:
            trying.set()
            assert go.wait(10)
        if number in (1, 2):
            raise OSError(f"away at {number}")
        return f"made at {number}"

    shared = Shared(make, every_s=0.0)
    assert shared.get() == "made at 0"
    with pytest.raises(OSError, match="away at 1"):
        shared.get()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        first = other.submit(shared.get)
        assert trying.wait(10)
        with pytest.raises(OSError, match="away at 1"):
            shared.get()
        go.set()
        assert str(first.exception(10)) == "away at 2"
    assert (shared.get(), next(tries)) == ("made at 3", 4)


def test_nobody_there_is_no_error(tmp_path: Path) -> None:
    assert FleetWatch(tmp_path).look() is None


class Elsewhere:
    """A server whose dispatcher is not the active one."""

    def answer(self, line: bytes) -> dict[str, str]:
        return {"error": "the dispatcher is at b:1"}


async def test_what_the_server_says_instead_of_its_fleet_is_told(tmp_path: Path) -> None:
    async with listening(operator_socket(tmp_path), Elsewhere()):
        with pytest.raises(RegistryError, match="the dispatcher is at b:1"):
            await asyncio.to_thread(ask_fleet, tmp_path)


# The verb.


def post_recent(site: Site) -> None:
    """Eleven that have just ended, and two that ended before; once, however often it is asked."""
    with site.operator.writing() as session:
        now_at = site.operator.clock()
        rows = [posting(f"r{n}", now_at - 1 - n / 10, 0.1 * (n + 1)) for n in range(10)]
        rows.append(posting("hit", now_at - 1, 9.0, outcome="cache_hit"))
        rows.append(posting("old", now_at - RATE_S - 30, 5.0))
        rows.append(posting("older", now_at - TTFT_S - 30, 50.0))
        ledger.post_many(session, rows)


def test_rates_times_and_money_of_now(site: Site) -> None:
    post_recent(site)
    found = traffic_now(site.operator)
    assert found.num_ended == 11
    assert found.requests_per_s == pytest.approx(11 / RATE_S)
    assert found.completion_tokens_per_s == pytest.approx(330 / RATE_S)
    assert (found.num_ttft, found.ttft_p99_s) == (11, 5.0)
    assert found.ttft_p50_s == pytest.approx(0.6)
    assert found.spent_today_nanos >= 11 * 1_000_000


def test_it_looks_at_so_many_postings_and_says_over_what_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    post_recent(site)
    for module in (recent, traffic):
        monkeypatch.setattr(module, "MAX_ENDED", 5)
    found = traffic_now(site.operator)
    assert found.num_ended <= 5
    assert found.rate_s < RATE_S


# The page.


def look(site: Site, handler: FleetHandler, told: FleetReport | None, text: str) -> str:
    """The page as of that, with `text` in it: what pages share is up to a second old."""
    handler.fleet = told
    visitor = site.visitor("ann")
    for _ in range(100):
        found = visitor.get("/overview").text
        if text in found:
            return found
        threading.Event().wait(0.1)
    raise AssertionError(f"the page never said {text!r}")


def test_the_page_says_all_of_it(site: Site, handler: FleetHandler) -> None:
    now_at = site.operator.clock()
    tenant = site.write(tenants.create_tenant, "acme", now_at=now_at)
    told = fleet(
        now_at,
        status(model("alpha"), model("beta", "loading")),
        evictions=[eviction(now_at - 2, "gamma", "beta", num_kept=9)],
        swaps=[swap(now_at - 2, "gamma", "evict", "room for beta")],
        waiting=[group(tenant.id, "beta")],
        dispatcher=queue(3, 2, beta=math.inf),  # nobody knows
    )
    text = look(site, handler, told, "acme")
    assert "weights 64.0 MiB, KV in use 12.0 MiB, cached KV 4.0 MiB" in text
    assert "load reason: idle models evicted" in text
    assert "maximum wait reached" in text
    assert "kept: no request served since it was loaded" in text
    assert "And 4 more." in text
    assert "room for beta" in text
    assert re.search(r">\s*3</a></dd>\s*<dd class=\"figure-note\">in the fair queue", text)
    assert "Page layout of worker-0" in text
    assert " style=" not in text


def test_a_hundred_models_are_a_small_page(site: Site, handler: FleetHandler) -> None:
    rows = [model(f"org/model-{n:03}-instruct") for n in range(100)]
    rows += [model(f"org/warm-{n:05}", "warm") for n in range(5000)]
    pages = {f"{row.model_id}/weights": 2 for row in rows[:100]} | {"free": 56}
    now_at = site.operator.clock()
    moves = [
        Move(now_at - 3000 + n, "worker-0", rows[n % 100].model_id, "warm", "resident")
        for n in range(2000)
    ]
    text = look(site, handler, fleet(now_at, status(*rows, pages=pages), moves=moves), "76 more on")
    assert "16 of 100 models" in text
    assert len(gzip.compress(text.encode())) < 40_000


def test_no_worker_a_lost_one_and_no_dispatcher_are_said(site: Site, handler: FleetHandler) -> None:
    now_at = site.operator.clock()
    look(site, handler, fleet(now_at), "No worker is connected")
    lost = fleet(now_at, lost={"worker-0": now_at - 5})
    text = look(site, handler, lost, "worker-0 stopped at")
    assert "No worker is connected since" in text, "in the banner"
    text = look(site, handler, None, "The dispatcher does not answer")
    assert "Requests per second" in text, "what the ledger knows is told all the same"


def test_the_first_page_is_the_overview_for_whoever_sees_all(
    site: Site, handler: FleetHandler
) -> None:
    del handler
    site.write(tenants.create_tenant, "crowd", now_at=site.operator.clock())
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "crowd")
    assert site.visitor("vera").get("/").url.endswith("/overview")
    tom = site.visitor("tom")
    assert "/tenants/ten_" in tom.get("/").url, "the only one that he may see"
    assert tom.get("/overview").status == 403
    assert tom.get("/live/overview").status == 401
    assert "/admin/overview" not in tom.get("/account").text
    theirs = acting_as(site.operator, site.read(users.get_user, "tom"))
    for verb in (may_watch, traffic_now):
        with pytest.raises(Forbidden):
            verb(theirs)


def test_one_of_several_gateway_processes_asks_the_dispatcher(tmp_path: Path) -> None:
    with running_site(tmp_path, gateway_processes=2) as several:
        several.add_model("alpha")
        told = fleet(several.operator.clock(), status(model("alpha")), dispatcher=queue(3, 2))
        with telling(several, FleetHandler(told)):
            visitor = several.visitor("ann")
            assert "resident" in visitor.get("/models/alpha").text
            assert "worker-0" in visitor.get("/health").text
            assert re.search(r"Waiting</dt><dd>3<", visitor.get("/fairness").text)
