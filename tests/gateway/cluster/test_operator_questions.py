"""Operators' questions on a server whose dispatcher is not the active one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from bench.processes import free_port
from gateway.cluster import dispatcher_server
from gateway.cluster.operator_questions import QuestionForwarder
from gateway.ipc import remote
from registry.servers.dispatcher_leases import LeaseRow
from tests.gateway.cluster.several_kit import Several
from tests.gateway.ipc.test_remote import authority


class Handler:
    """Says what it was asked; `slow` until it is told."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    def answer(self, line: bytes) -> dict[str, Any] | Any:
        asked = msgspec.json.decode(line)
        return self._later(asked) if asked == "slow" else {"asked": asked}

    async def _later(self, asked: str) -> dict[str, Any]:
        await self.told.wait()
        return {"asked": asked}


@asynccontextmanager
async def forwarding(folder: Path, handler: Handler | None) -> AsyncIterator[QuestionForwarder]:
    """To a dispatcher with gateways, beside which the questions come."""
    tls, port = authority(folder / "ca", "a", "b"), free_port()
    several = Several()
    several.server.handler = handler
    row = LeaseRow("a", f"127.0.0.1:{port}", 1, 1.0)
    lease: Any = SimpleNamespace(seen=row)
    async with remote.listening(("127.0.0.1", port), tls["a"], several.server.new_channel):
        yield QuestionForwarder(lease, tls["b"])
    assert several.server.num_gateways == 2


async def test_an_answer_comes_back_as_it_was_given(tmp_path: Path) -> None:
    handler = Handler()
    async with forwarding(tmp_path, handler) as forwarder:
        slow = asyncio.create_task(forwarder.answer(b'"slow"'))
        assert await forwarder.answer(b'{"ask":"why"}\n') == {"asked": {"ask": "why"}}
        handler.told.set()
        assert await slow == {"asked": "slow"}


async def test_who_cannot_be_answered_is_told_where_the_dispatcher_is(tmp_path: Path) -> None:
    async with forwarding(tmp_path, None) as forwarder:
        for _ in range(2):
            answer = await forwarder.answer(b"1")
            assert set(answer) == {"error"}
            assert "127.0.0.1:" in answer["error"]
    assert "does not answer" in (await forwarder.answer(b"1"))["error"]  # nobody listens any more
    nobody: Any = SimpleNamespace(seen=None)
    assert "yet" in (await QuestionForwarder(nobody, forwarder._tls).answer(b"1"))["error"]


async def test_questions_at_a_time_are_bounded(tmp_path: Path) -> None:
    handler = Handler()
    async with forwarding(tmp_path, handler) as forwarder:
        most = dispatcher_server.MAX_QUESTIONS
        waiting = [asyncio.create_task(forwarder.answer(b'"slow"')) for _ in range(most)]
        await asyncio.sleep(0.3)
        assert "error" in await forwarder.answer(b'"one too many"')
        handler.told.set()
        assert await asyncio.gather(*waiting) == [{"asked": "slow"}] * most
        assert await forwarder.answer(b'"again"') == {"asked": "again"}
