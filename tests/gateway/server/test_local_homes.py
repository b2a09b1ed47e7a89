"""The homes of one machine's workers: those with too small an arena begin anew one by one."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from admin.context.operator_context import open_context
from gateway.dispatch.operator_handler import OperatorHandler
from gateway.http.http_server import running
from gateway.ipc.control_socket import listening, operator_socket
from gateway.server import local_homes
from gateway.server.local_homes import LocalHomes
from gateway.server.worker_slots import WorkerSlot
from gateway.settings.settings import Settings
from registry import audit
from registry.models import worker_orders
from tests.gateway.scripted_worker import Rig
from tests.migrated import migrated

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
NAMES = ("worker-0", "worker-1")
DEMO = {"python": 9 << 20, "shakespeare": 8 << 20, "sherlock": 7 << 20}


async def test_outgrown_workers_are_restarted_one_after_another_by_the_dispatcher(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(local_homes, "RENEW_LOOK_S", 0.02)
    settings = Settings(data_dir=str(tmp_path), demo=True, worker_drain_timeout_s=0.0)
    migrated(settings.registry_url)
    slots = [WorkerSlot(name, "cpu", (n,), num_workers=2) for n, name in enumerate(NAMES)]
    ended: list[str] = []
    homes = LocalHomes(
        settings, slots, SLEEP, lambda name, *_: ended.append(name), CollectorRegistry()
    )
    homes.set_weights(DEMO)
    rig = Rig(settings)
    workers = {name: rig.worker(name, started_at=1.0) for name in NAMES}
    dispatcher: Any = rig.dispatcher
    drains = rig.local.dispatcher.drains
    drains.on_restart = homes.restart
    handler = OperatorHandler(dispatcher, {"m"}.__contains__)

    async def look() -> None:
        """Time passes for the dispatcher, which reads its orders."""
        with open_context(settings, "test") as context, context.reading() as session:
            drains.set_orders(worker_orders.all_orders(session))
        rig.clock.now_s += 0.1
        for worker in workers.values():
            worker.status()
        rig.dispatcher.tick()
        await asyncio.sleep(0.01)

    async with listening(operator_socket(tmp_path), handler), running(homes.run()):
        async with asyncio.timeout(20):
            while any(one.process.pid is None for one in homes._workers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            homes.set_weights({**DEMO, "own": 20 << 20})
            for number, name in enumerate(NAMES):
                while len(ended) == number:
                    await look()
                assert ended == list(NAMES[: number + 1]), "the other one serves"
                for _ in range(5):
                    await look()
                assert len(ended) == number + 1, "the next waits until this one is back"
                workers[name].die()
                workers[name].started_at = 2.0
                workers[name].connect()
            assert not any(one.is_outgrown for one in homes._workers)
            assert [one.process.num_starts for one in homes._workers] == [2, 2]
        await homes.stop()
    with open_context(settings, "test") as context, context.reading() as session:
        entries = [entry for entry in audit.latest(session, 10) if "worker" in entry.action]
        assert [(e.actor, e.target) for e in reversed(entries)] == [("server", n) for n in NAMES]
