"""The operator's questions to a running server: the handler's answers, the socket, the commands."""

import asyncio
import contextlib
import json
import socket
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from admin.cli.main import main
from admin.context.operator_context import open_context
from admin.operations import tenants as service_tenants
from gateway.dispatch.decisions import DecisionRecord
from gateway.dispatch.operator_handler import OperatorHandler
from gateway.dispatch.policy.reasons import DecisionFigures
from gateway.ipc import machine
from gateway.ipc.control_socket import (
    MAX_CALLERS,
    MAX_QUESTION_BYTES,
    ask,
    listening,
    operator_socket,
)
from gateway.settings.settings import Settings
from registry import locks
from registry.errors import RegistryError
from tests.gateway.scripted_worker import Rig
from tests.migrated import migrated

WALL_S = 1_000_000.0


def handler_of(rig: Rig) -> OperatorHandler:
    def wall_clock() -> float:
        return WALL_S + rig.clock.now_s

    return OperatorHandler(
        cast(Any, rig.dispatcher), {"m", "n"}.__contains__, {}, {}, rig.clock, wall_clock
    )


def waiting_rig(tenant: str = "t") -> Rig:
    """One request runs, one waits for the same worker, one for a load."""
    rig = Rig()
    rig.worker(num_requests=1)
    for request_id, model in (("a", "m"), ("b", "m"), ("c", "n")):
        rig.ask(request_id, tenant, model)
    return rig


def answer(rig: Rig, **question: object) -> dict[str, Any]:
    found = handler_of(rig).answer(json.dumps(question).encode())
    assert isinstance(found, dict)
    json.dumps(found, default=lambda value: None)  # whatever is in it has a form
    return found


async def test_all_that_waits_one_model_and_one_request() -> None:
    rig = waiting_rig()
    every = answer(rig, ask="why")
    assert every["num_waiting"] == 2
    assert {(row["model"], row["code"]) for row in every["waiting"]} == {
        ("m", "worker full"),
        ("n", "loading"),
    }
    one = answer(rig, ask="why", what="n")
    assert [row["request_id"] for row in one["waiting"]] == ["c"]
    assert one["model"] == {"name": "n", "failure": None, "workers": {"w": "cold"}}
    (request,) = answer(rig, ask="why", what="b")["requests"]
    assert (request["code"], request["rooms"][0]["free_requests"]) == ("worker full", 0)
    assert answer(rig, ask="why", tenant="nobody")["waiting"] == []
    assert "neither" in answer(rig, ask="why", what="x")["error"]


async def test_decisions_have_the_time_of_the_wall() -> None:
    rig = waiting_rig()
    figures = DecisionFigures(until_s=rig.clock.now_s + 2.0)
    record = DecisionRecord(
        rig.clock.now_s, "held", "too few requests waiting", "m", figures=figures
    )
    rig.dispatcher.decisions.add(record)
    found = answer(rig, ask="decisions", model="m")
    (row,) = found["decisions"]
    assert (row["kind"], row["at"]) == ("held", WALL_S + rig.clock.now_s)
    assert row["figures"]["until_s"] == pytest.approx(row["at"] + 2.0)
    assert {"kind": "held", "reason": "too few requests waiting", "count": 1} in found["counts"]
    assert [row["model"] for row in answer(rig, ask="decisions")["decisions"]] == ["m", "n"]
    assert len(answer(rig, ask="decisions", limit=1)["decisions"]) == 1


@pytest.mark.parametrize(
    "line", [b"", b"x", b"[]", b'{"ask": "why", "to": 1}', b'{"ask": 1}', b"[" * 3000, b"\xff"]
)
def test_what_is_no_question_is_told_so(line: bytes) -> None:
    found = handler_of(Rig()).answer(line)
    assert isinstance(found, dict)
    assert "invalid request" in found["error"]


async def test_the_socket_is_this_users_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = operator_socket(tmp_path)
    path.write_text("left by a server that was killed")
    async with listening(path, handler_of(waiting_rig())):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.parent.stat().st_mode & 0o077 == 0
        found = await asyncio.to_thread(ask, tmp_path, ask="why")
        assert found["num_waiting"] == 2
        with pytest.raises(RegistryError, match="unknown request 'when'"):
            await asyncio.to_thread(ask, tmp_path, ask="when")
    assert not path.exists()
    with pytest.raises(RegistryError, match="no server is running"):
        ask(tmp_path, ask="why")


async def test_callers_beyond_the_bound_and_endless_lines_are_sent_away(tmp_path: Path) -> None:
    path = operator_socket(tmp_path)
    async with listening(path, handler_of(waiting_rig())):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"x" * (2 * MAX_QUESTION_BYTES))
        with contextlib.suppress(ConnectionError):  # who has not read it all may say so
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        silent = [await asyncio.open_unix_connection(path) for _ in range(MAX_CALLERS)]
        for _ in range(20):  # until all are counted, however busy the machine is
            await asyncio.sleep(0.005)
        with pytest.raises(RegistryError, match="closed the connection"):
            await asyncio.to_thread(ask, tmp_path, ask="why")
    for silent_reader, silent_writer in silent:
        assert await silent_reader.read() == b""
        silent_writer.close()
        await silent_writer.wait_closed()


def test_a_socket_nobody_listens_on_is_no_server(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(machine.socket_path(tmp_path, "operator")))
    with pytest.raises(RegistryError, match="no server is running"):
        ask(tmp_path, ask="why")


def test_a_server_whose_socket_is_gone_is_not_said_to_be_stopped(tmp_path: Path) -> None:
    with locks.hold(tmp_path / locks.SERVER_LOCK), pytest.raises(RegistryError) as caught:
        ask(tmp_path, ask="why")
    assert "a server is running on" in str(caught.value)
    assert str(operator_socket(tmp_path)) in str(caught.value)
    assert "restart" in str(caught.value)


async def test_the_commands_show_tenants_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(data_dir=str(tmp_path))
    migrated(settings.registry_url)
    with open_context(settings, "test") as context:
        tenant = service_tenants.create_tenant(context, "acme")
    rig = waiting_rig(tenant.id)

    async def run(*arguments: str) -> str:
        status = await asyncio.to_thread(main, [*arguments, "--data-dir", str(tmp_path)])
        out, err = capsys.readouterr()
        return out if status == 0 else f"{status}: {err}"

    async with listening(operator_socket(tmp_path), handler_of(rig)):
        shown = await run("why")
        assert "acme" in shown
        assert "worker full: w is full: it runs 1 requests" in shown
        assert "loading: n is being loaded on w (free memory)" in shown
        assert "own older requests" in await run("why", "b")
        assert (await run("why", "m")).startswith("m: resident on w\n")
        assert json.loads(await run("why", "--json", "--tenant", "acme"))["num_waiting"] == 2
        assert (await run("why", "--tenant", "other")).startswith("1: polyhost: unknown tenant")
        assert "free memory" in await run("decisions")
        rows = json.loads(await run("decisions", "--model", "n", "--json"))["decisions"]
        assert [row["kind"] for row in rows] == ["load"]
        assert (await run("why", "nothing")).startswith("1: polyhost: 'nothing' is neither")
        rig.worker("two", states={"n": "resident"})
        three = rig.worker("three", states={"n": "resident"})
        rig.ask("d", tenant.id, "n")
        shown = await run("why", "d")
        assert "granted to three of 2 workers: fewest requests" in shown
        assert "w does not have the model: a load would take" in shown
        three.finish("d")
        assert "d, of acme for n, has ended" in await run("why", "d")
        shown = await run("decisions", "--grants", "--model", "n")
        assert "chosen, two: " in shown
        rows = json.loads(await run("decisions", "--grants", "--json"))["grants"]
        assert [(row["request_id"], row["tenant"]) for row in rows] == [("d", "acme")]
    assert (await run("decisions")).startswith("1: polyhost: no server is running")
