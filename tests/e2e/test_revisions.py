"""A model's revision is switched under a running server: new requests get it, old ones finish."""

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.servers import Server
from registry.models import catalog, revisions
from registry.models.catalog import PackFacts
from registry.session import make_engine, reading, writing
from tests.e2e.conftest import Prepared
from tests.e2e.server import polyhost, polyhost_json, usage_rows

pytestmark = pytest.mark.e2e

NAME = "shakespeare"
BODY = {"model": NAME, "messages": [{"role": "user", "content": "Good morning."}], "temperature": 0}


async def ask(
    session: aiohttp.ClientSession, server: Server, key: str, tokens: int, begun: asyncio.Event
) -> tuple[set[str], str, int]:
    """A stream's fingerprints, its finish reason, and its number of tokens."""
    prints: set[str] = set()
    reason, count = "", 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body: dict[str, Any] = {**BODY, **options, "max_tokens": tokens}
    url, headers = f"{server.url}/v1/chat/completions", {"authorization": f"Bearer {key}"}
    async with session.post(url, json=body, headers=headers) as answer:
        if (
            answer.status == 503
            and "was replaced while the request was queued" in await answer.text()
        ):
            return set(), "", 0  # it came in the moment of the switch, and is told to come again
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            prints.add(event["system_fingerprint"])
            if event["choices"]:
                begun.set()
                reason = event["choices"][0]["finish_reason"] or reason
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    return prints, reason, count


def switch(data_dir: Path) -> tuple[str, str]:
    """What a finished `models update` leaves in the registry; (old, new) revision."""
    engine = make_engine(f"sqlite:///{data_dir / 'polyhost.db'}")
    with reading(engine) as session:
        old, new = (catalog.get_model(session, name) for name in (NAME, "sherlock"))
    facts = {field.name: getattr(new, field.name) for field in dataclasses.fields(PackFacts)}
    with writing(engine, "test") as session:
        row = revisions.begin_update(session, NAME, new.source, dtype="auto", now_at=time.time())
        revisions.finish(session, row.registration, PackFacts(**facts), keep=3, now_at=time.time())
    engine.dispose()
    return old.revision, new.revision


async def test_a_switch_and_a_rollback_while_requests_run(
    prepared: Prepared, server: Server
) -> None:
    data_dir, key = server.data_dir, prepared.keys["switcher"]
    async with aiohttp.ClientSession() as session:
        whole, _, length = await ask(session, server, key, 400, asyncio.Event())

        async def until(revision: str) -> None:
            deadline = time.monotonic() + 30
            while True:
                found, _, _ = await ask(session, server, key, 2, asyncio.Event())
                if found == {f"fp_{revision[:12]}"}:
                    return
                assert time.monotonic() < deadline, "the other revision does not come"

        begun = asyncio.Event()
        running = asyncio.create_task(ask(session, server, key, 400, begun))
        await begun.wait()
        old, new = await asyncio.to_thread(switch, data_dir)
        await until(new)
        assert whole == {f"fp_{old[:12]}"}
        # The one that was running went on with what it began with, to its end.
        prints, reason, count = await running
        assert (prints, count) == (whole, length)
        assert reason in ("stop", "length")

        begun = asyncio.Event()
        running = asyncio.create_task(ask(session, server, key, 400, begun))
        await begun.wait()
        done = await asyncio.to_thread(polyhost, data_dir, "models", "rollback", NAME)
        assert done.returncode == 0, done.stderr
        await until(old)
        prints, reason, _ = await running
        assert prints == {f"fp_{new[:12]}"}
        assert reason in ("stop", "length")
    known = polyhost_json(data_dir, "models", "revisions", NAME)
    assert [(row["revision"], row["current"]) for row in known] == [(old, True), (new, False)]
    server.wait_until(server.has_posted)
    rows = usage_rows(data_dir, tenant="switcher")
    assert {row["revision"] for row in rows} == {old, new}
