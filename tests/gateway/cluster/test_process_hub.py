"""One answer to /metrics of several processes, and what else they tell one another."""

import asyncio
import math
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram

from gateway.cluster import process_hub as hub
from gateway.cluster.process_hub import HubLink, ProcessHub
from gateway.ipc import ipc
from gateway.metrics.families import MetricsRegistry
from gateway.workers.worker_client import LossCause
from tests.gateway.ipc.test_ipc import until


def registry(count: float, gauge: float, ready: int = 1) -> MetricsRegistry:
    """What one process counts."""
    own = MetricsRegistry()
    Counter("polyhost_requests", "Asked.", ["model"], registry=own).labels("m").inc(count)
    Gauge("polyhost_open", "Open.", registry=own).set(gauge)
    Gauge("polyhost_ready", "Ready.", registry=own).set(ready)
    Histogram("polyhost_seconds", "Took.", buckets=(1.0, 2.0), registry=own).observe(count)
    return own


class Told:
    """What links and hub were told. Implements WorkerHomes."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str, LossCause]] = []
        self.weights: list[dict[str, int]] = []
        self.silent: list[str] = []
        self.restarts: list[tuple[str, bool]] = []
        self.orphaned = 0

    def orphan(self) -> None:
        self.orphaned += 1

    def hub(self, silence_s: float = 60.0) -> ProcessHub:
        own = registry(100, 0)
        return ProcessHub(
            own,
            math.inf,
            silence_s,
            self,
            self.silent.append,
        )

    def set_weights(self, weights: dict[str, int]) -> None:
        self.weights.append(weights)

    def restart(self, worker_id: str) -> None:
        self.restarts.append((worker_id, False))

    def kill(self, worker_id: str) -> None:
        self.restarts.append((worker_id, True))

    def link(self, name: str, own: MetricsRegistry, *, ready: bool = True) -> HubLink:
        return HubLink(
            name,
            own,
            lambda: ready,
            lambda worker, reason, cause: self.ended.append((worker, reason, cause)),
            self.orphan,
        )


def sample(body: bytes, name: str) -> float:
    (line,) = [line for line in body.decode().splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


async def test_a_scrape_at_any_process_is_of_all(tmp_path: Path) -> None:
    told = Told()
    meeting = told.hub()
    async with ipc.listening(tmp_path / "hub", meeting.new_channel):
        one = told.link("gateway-0", registry(1, 2))
        two = told.link("gateway-1", registry(2, 3), ready=False)
        for link in (one, two):
            await link.connect(tmp_path / "hub")
        await until(lambda: len([c for c in meeting._children if c.name]) == 2)
        body = await two.scrape()
        assert sample(body, 'polyhost_requests_total{model="m"}') == 103
        assert sample(body, "polyhost_open") == 5
        assert meeting.is_ready("gateway-0")
        assert not meeting.is_ready("gateway-1")
        assert not meeting.is_ready("gateway-2")

        one.close()
        await until(lambda: len(meeting._children) == 1)
        body = await two.scrape()
        assert sample(body, 'polyhost_requests_total{model="m"}') == 103  # it never falls
        assert sample(body, "polyhost_open") == 3

        two.set_weights({"m": 5})
        meeting.worker_ended("worker-0", "killed", "process")
        two.restart("worker-0")
        two.kill("worker-1")
        await until(lambda: told.weights and told.ended and len(told.restarts) == 2)
        assert told.restarts == [("worker-0", False), ("worker-1", True)]
        assert told.weights == [{"m": 5}]
        assert told.ended == [("worker-0", "killed", "process")]
        assert told.orphaned == 0


async def test_who_does_not_answer_counts_with_what_it_told_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "COLLECT_S", 0.005)
    told = Told()
    meeting = told.hub(silence_s=0.01)
    async with ipc.listening(tmp_path / "hub", meeting.new_channel):
        link = told.link("gateway-0", registry(1, 2))
        await link.connect(tmp_path / "hub")
        await until(lambda: any(child.name for child in meeting._children))
        assert sample(await meeting.text(), "polyhost_open") == 2
        link._channel.on_message = lambda message: None  # it hangs
        monkeypatch.setattr(hub, "ANSWER_S", 0.01)
        assert sample(await meeting.text(), "polyhost_open") == 2
        running = asyncio.create_task(meeting.run())
        await until(lambda: "gateway-0" in told.silent)
        running.cancel()


async def test_a_child_learns_that_its_parent_is_gone(tmp_path: Path) -> None:
    told = Told()
    meeting = told.hub()
    link = told.link("gateway-0", registry(1, 2))
    async with ipc.listening(tmp_path / "hub", meeting.new_channel):
        await link.connect(tmp_path / "hub")
        await until(lambda: meeting._children)
        (child,) = meeting._children
        child.channel.lose("killed")
        await until(lambda: told.orphaned == 1)
    with pytest.raises(OSError, match=r"refused|No such file"):
        await told.link("late", registry(0, 0)).connect(tmp_path / "hub")
