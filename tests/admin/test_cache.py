"""The page on cached answers: figures from counters and sums, stores asked, flushing."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from admin.operations.cache import upper_bound
from gateway.cache.cache_handler import CacheHandler, cache_socket_path
from gateway.cache.memory_store import MemoryAnswers
from gateway.ipc.control_socket import listening
from registry import audit
from registry.accounts import tenants
from registry.money import ledger, rollups
from registry.money.ledger import Posting
from tests.admin.site import Site, Visitor
from tests.gateway.cache.answers_kit import entry_of, scope_of

HOSTILE = '"><script>alert(1)</script>'


class Handler(CacheHandler):
    """The gateway's own, which notes what it was asked."""

    def __init__(self) -> None:
        self.store = MemoryAnswers(1 << 20, 1 << 20)
        super().__init__(self.store)
        self.asked: list[bytes] = []

    async def answer(self, line: bytes) -> dict[str, Any]:
        self.asked.append(line)
        return await super().answer(line)


@pytest.fixture(scope="module")
def handler(site: Site) -> Iterator[Handler]:
    """A gateway's socket in the site's data folder."""
    up, over = threading.Event(), threading.Event()
    handler = Handler()

    async def serve() -> None:
        path = cache_socket_path(site.operator.settings.data_path, "g0")
        path.parent.mkdir(parents=True, exist_ok=True)
        async with listening(path, handler):
            up.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(10)
    yield handler
    over.set()
    thread.join(10)


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    site.add_model("tiny")
    now_at = site.operator.clock()
    with site.operator.writing() as session:
        tenant = tenants.create_tenant(session, "acme", now_at=now_at)
        postings = [
            Posting(
                f"chatcmpl-{n}", tenant.id, "key_1", "tiny", "rev", "chat",
                "cache_hit" if n < 3 else "finished", 12, 0, 30, 2_000_000, 0.1, 0.0, 0.5, 1.5,
                now_at,
            )
            for n in range(12)
        ]  # fmt: skip
        ledger.post_many(session, postings)
        rollups.roll(session, rollups.newest_seq(session))
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "acme")
    return site.visitor("ann")


def test_hits_by_tenant_and_model_are_the_ledgers(ann: Visitor) -> None:
    text = ann.get("/cache").text
    assert 'Answers" class="number">12<' in text
    assert 'Cache hits" class="number">3<' in text
    assert "25.0 %" in text
    assert "0.0060" in text


def test_rates_checks_and_savings_are_the_counters(site: Site, ann: Visitor) -> None:
    text = ann.get("/cache").text
    assert "no server is running" in text, "nobody can say what is kept"
    assert "no checks so far" in text
    pipeline_metrics = site.kit.edge.metrics
    pipeline_metrics.cache_requests.labels("hit").inc(3)
    pipeline_metrics.cache_requests.labels("miss").inc(7)
    collectors = site.kit.edge.services.metrics_registry._names_to_collectors
    checks: Any = collectors["polyhost_semantic_cache_checks_total"]
    checks.labels("agreed").inc(98)
    checks.labels("differed").inc(2)
    text = ann.get("/cache").text
    assert "30.0 %" in text
    assert "3 of 10 lookups" in text
    assert "2 of 100 differed; at most 7.0 %" in text


@pytest.mark.parametrize(("bad", "total", "most"), [(0, 0, 1.0), (0, 100, 0.037), (2, 100, 0.07)])
def test_the_bound_of_a_share(bad: int, total: int, most: float) -> None:
    assert upper_bound(bad, total) == pytest.approx(most, abs=5e-4)
    assert upper_bound(total, total) == pytest.approx(1.0)


def test_stores_say_what_they_keep_and_are_flushed(
    site: Site, ann: Visitor, handler: Handler
) -> None:
    text = ann.get("/cache").text
    assert "g0" in text
    assert "memory" in text
    asked = ann.get("/cache/confirm?tenant=acme&model=")
    assert "Flush the cache of acme?" in asked.text
    assert not any(b"purge" in line for line in handler.asked), "a look changes nothing"
    done = ann.post("/cache/flush", {"tenant": "acme", "model": ""})
    assert "Flushed all answers of acme" in done.text
    assert any(b"purge" in line for line in handler.asked)
    done = ann.post("/cache/flush", {"tenant": "acme", "model": "tiny"})
    assert "Flushed 0 answers of acme for tiny" in done.text
    assert site.read(audit.latest, 1)[0].action == "cache.purge"


def test_answers_of_a_tenant_are_listed(site: Site, ann: Visitor, handler: Handler) -> None:
    with site.operator.reading() as session:
        acme = next(one.id for one in tenants.list_tenants(session) if one.name == "acme")

    async def keep(question: str, model: str) -> None:
        scope = scope_of(acme, model)
        found = await handler.store.exact(scope, bytes(32))
        await handler.store.keep(entry_of(scope, question, found.epoch, made_at=time.time()))

    for question, model in ((HOSTILE, "tiny"), ("why?", "tiny"), ("how?", "other")):
        asyncio.run(keep(question, model))
    assert "Cached answers of a tenant" in ann.get("/cache").text
    assert "No cached answers" not in ann.get("/cache/answers").text
    text = ann.get("/cache/answers?tenant=acme&model=").text
    assert all(f'<td data-label="Question" class="wide">{one}' in text for one in ("why?", "how?"))
    assert HOSTILE not in text
    assert "3 answers" in text
    text = ann.get("/cache/answers?tenant=acme&model=other").text
    assert "how?" in text
    assert "why?" not in text
    assert "No cached answers" in ann.get("/cache/answers?tenant=acme&model=none").text
    missing = ann.get("/cache/answers?tenant=nobody")
    assert missing.status == 422
    assert "nobody" in missing.text


def test_what_is_wrong_is_said(ann: Visitor, handler: Handler) -> None:
    del handler
    assert ann.get("/cache/confirm").status == 422
    assert ann.post("/cache/flush", {"tenant": "", "model": ""}).status == 422
    assert ann.post("/cache/flush", {"tenant": "nobody", "model": ""}).status == 404
    page = ann.get("/cache/confirm?model=%22%3E%3Cscript%3Ealert(1)%3C/script%3E").text
    assert HOSTILE not in page


def test_a_viewer_sees_and_a_tenants_user_does_not(
    site: Site, ann: Visitor, handler: Handler
) -> None:
    del ann
    vera, tom = site.visitor("vera"), site.visitor("tom")
    assert vera.get("/cache").status == 200
    assert "/cache/confirm" not in vera.get("/cache").text
    assert vera.get("/cache/answers?tenant=acme").status == 403
    assert vera.get("/cache/confirm?tenant=acme").status == 403
    before = len(handler.asked)
    assert vera.post("/cache/flush", {"tenant": "acme"}).status == 403
    assert tom.get("/cache").status == 403
    assert tom.get("/live/cache").status == 401
    assert tom.post("/cache/flush", {"tenant": "acme"}).status == 403
    assert not any(b"purge" in line for line in handler.asked[before:])
