"""Several servers with one dispatcher: the active dispatcher and its whole server are killed and
stopped under streams through the other server, and a lost server's books are closed."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from bench import client
from tests.e2e.conftest import Prepared
from tests.e2e.server import polyhost_json, usage_rows
from tests.e2e.test_failures import begin
from tests.e2e.test_workers import bodies
from tests.e2e.two_servers import (
    NAMES,
    Pair,
    check,
    disturb,
    streams,
    two_servers,
    undisturbed,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pair(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("servers")
    with two_servers(root, {name: prepared.copy_to(root / name) for name in NAMES}) as made:
        yield made


@pytest.mark.parametrize(
    ("number", "whole", "tenant"),
    [
        (signal.SIGKILL, False, "killed"),
        (signal.SIGSTOP, False, "gone"),
        (signal.SIGKILL, True, "crowd"),
        (signal.SIGSTOP, True, "switcher"),
    ],
)
async def test_the_other_server_s_streams_do_not_notice(
    prepared: Prepared, pair: Pair, number: signal.Signals, whole: bool, tenant: str
) -> None:
    await undisturbed(pair, prepared.keys["acme"])
    first, key = pair.active(), prepared.keys[tenant]
    took_s, seen = await disturb(pair, number, key, whole=whole)
    print(f"{number.name} of the {'server' if whole else 'dispatcher'}: {took_s:.2f} s")
    check(pair, tenant, seen)
    async with streams(pair.servers[first], key) as again:
        pass
    check(pair, tenant, again)
    assert len(usage_rows(pair.folders[first], tenant=tenant)) == len(seen) + len(again)
    for folder in pair.folders.values():  # Wherever the dispatcher is, operators are answered.
        rows = polyhost_json(folder, "workers", "list")
        assert {row["name"]: row["state"] for row in rows} == {
            "far-0": "serving",
            "far-1": "serving",
        }


async def test_a_lost_server_s_requests_are_closed_by_the_other_and_stay_closed(
    prepared: Prepared, pair: Pair
) -> None:
    lost = pair.active()
    server = pair.servers[pair.other(lost)]
    async with client.new_session(force_close=True) as session:
        seen, ended = await begin(pair.servers[lost], prepared.keys["revoked"], session, bodies())
        begun = {one.request_id for one in seen if one.chunks}
        await asyncio.sleep(1.5)  # By then the database knows of these.
        pair.send_all(lost, signal.SIGKILL)
        await ended
    assert {one.end for one in seen} <= {"broken", "done"}

    def bill() -> dict[str, tuple[str, int, int]]:
        rows = usage_rows(server.data_dir, tenant="revoked")
        assert len({row["request_id"] for row in rows}) == len(rows)
        told = ("outcome", "completion_tokens", "cost_nanos")
        return {row["request_id"]: tuple(row[name] for name in told) for row in rows}

    server.wait_until(lambda: begun <= bill().keys())
    server.wait_until(lambda: pair.open_records() == 0)
    before = bill()
    assert {outcome for outcome, _, _ in before.values()} <= {"finished", "disconnected", "failed"}
    assert any(outcome == "disconnected" and tokens for outcome, tokens, _ in before.values())
    pair.heal(lost, signal.SIGKILL)
    pair.servers[lost].wait_until(lambda: pair.open_records() == 0)  # Its journal has them again.
    pair.servers[lost].wait_until(pair.servers[lost].has_posted)
    after = bill()  # Of what only its journal knew it has posted the rest.
    assert {request_id: after[request_id] for request_id in before} == before
