"""An operator has the books checked: the dispatcher's, other parts' and each worker's own."""

import asyncio
from typing import Any

import msgspec
import pytest

from engine.protocol import CheckIntegrity
from gateway.dispatch import integrity_check
from gateway.dispatch.integrity_check import CheckResult
from gateway.dispatch.operator_handler import OperatorHandler
from tests.gateway.scripted_worker import Rig, ScriptedWorker


def asked(worker: ScriptedWorker) -> int:
    """The call of the last check that it was sent."""
    return [m for m in worker.sent if isinstance(m, CheckIntegrity)][-1].call


def found(worker: ScriptedWorker, text: str = "") -> None:
    """It has checked itself and says so."""
    worker.say(msgspec.structs.replace(worker.make_status([]), checked=(asked(worker), text)))


async def begun(rig: Rig) -> "asyncio.Task[dict[str, CheckResult]]":
    task = asyncio.create_task(rig.dispatcher.check_workers())
    await asyncio.sleep(0)
    return task


async def test_each_worker_answers_for_itself() -> None:
    rig = Rig()
    right, wrong, dying, away = (rig.worker(name) for name in ("right", "wrong", "dying", "away"))
    away.die()
    task = await begun(rig)
    found(right)
    found(wrong, "3 pages have two owners")
    wrong.die()  # as a worker does that has found something
    dying.die()
    assert await task == {
        "right": CheckResult("ok"),
        "wrong": CheckResult("broken", "3 pages have two owners"),
        "dying": CheckResult("ended", "see its log"),
        "away": CheckResult("down"),
    }


async def test_an_answer_to_an_earlier_check_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integrity_check, "ANSWER_S", 0.1)
    rig = Rig()
    worker = rig.worker()
    first = await begun(rig)
    found(worker)
    assert await first == {"w": CheckResult("ok")}
    assert await rig.dispatcher.check_workers() == {"w": CheckResult("no answer")}


async def test_the_handler_asks_every_part_and_names_what_is_wrong() -> None:
    rig = Rig()
    worker = rig.worker()

    def of_limits() -> None:
        raise AssertionError("day of acme: 3 != 4")

    dispatcher: Any = rig.dispatcher
    handler = OperatorHandler(dispatcher, {"m"}.__contains__, {}, {"limits": of_limits})

    async def checks() -> dict[str, dict[str, str]]:
        answer: Any = handler.answer(b'{"ask": "check"}')
        task = asyncio.create_task(answer)
        await asyncio.sleep(0)
        found(worker)
        told: dict[str, dict[str, str]] = (await task)["checks"]
        return told

    right = {"state": "ok", "text": ""}
    limits = {"state": "broken", "text": "day of acme: 3 != 4"}
    assert await checks() == {"dispatcher": right, "limits": limits, "w": right}
    rig.ask("a")
    ticket = rig.local.dispatcher._running.live["a"]
    ticket.state = "ended"
    assert (await checks())["dispatcher"]["state"] == "broken"
    ticket.state = "granted"
