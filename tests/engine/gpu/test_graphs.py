"""Which steps are recorded, how long they are kept, and what the fake's graphs are worth."""

from functools import partial
from typing import Any

import pytest
import torch

from engine.backend.device import Event
from engine.errors import CaptureFailed, CapturesEnded
from engine.gpu.device_batch import StepForm, row_bucket, width_bucket
from engine.gpu.graphs import GraphKey, StepGraphs
from tests.engine.fake_device import FakeDevice, FakeStream


def key(instance: str = "u", rows: int = 1, weights: tuple[int, ...] = (1,)) -> GraphKey:
    return GraphKey(instance, StepForm(rows, 0, rows, 0, (16,), (0,)), weights, (7,))


class Rig:
    """Graphs over a device; `run` is a step that adds one to what lies at `value`."""

    def __init__(self, limit_bytes: int = 1 << 20, seed: int | None = None) -> None:
        self.device = FakeDevice(seed, lazy=1.0)
        self.stream: FakeStream = self.device.stream()
        self.graphs = StepGraphs(self.device, limit_bytes, self.mark)
        self.value = torch.zeros(4)
        self.num_launched = 0

    def mark(self) -> Event:
        return self.stream.record()

    def work(self) -> torch.Tensor:
        self.num_launched += 1
        return self.value + 1

    def run(self, which: GraphKey) -> list[float]:
        results: list[torch.Tensor] = []
        self.stream.run(lambda: results.append(self.graphs.run(which, self.work).clone()))
        self.stream.record().wait()
        found: list[float] = results[0].tolist()
        return found

    def count(self, name: str) -> int:
        return int(self.graphs.counters[name])


def test_launched_then_recorded_then_replayed() -> None:
    rig = Rig()
    for number in range(5):
        rig.value.fill_(number)
        assert rig.run(key()) == [number + 1.0] * 4
    # Once by hand, once to be recorded; python runs no more.
    assert (rig.num_launched, rig.device.num_captures, rig.device.num_replays) == (2, 1, 4)
    assert (rig.count("graph_replays"), rig.count("steps_not_replayed")) == (4, 1)


def test_another_address_is_another_graph() -> None:
    rig = Rig()
    for which in (key(), key(weights=(2,)), key(rows=2), key(instance="v")):
        rig.run(which)
        rig.run(which)
    assert len(rig.graphs) == 4
    rig.graphs.drop("u", but_at=(2,))
    assert len(rig.graphs) == 2
    rig.run(key(weights=(2,)))
    assert rig.num_launched == 8
    rig.run(key())
    assert rig.num_launched == 9


def test_the_least_recently_used_goes() -> None:
    rig = Rig(limit_bytes=40)  # a graph holds 16 bytes
    for rows in (1, 2, 1, 2):
        rig.run(key(rows=rows))
    rig.run(key(rows=1))
    for _ in range(2):
        rig.run(key(rows=3))
    assert (len(rig.graphs), rig.count("graphs_dropped")) == (2, 1)
    launched = rig.num_launched
    rig.run(key(rows=1))
    assert rig.num_launched == launched
    rig.run(key(rows=2))
    assert rig.num_launched == launched + 1


def test_a_dropped_graph_lives_until_its_replay_has_ended() -> None:
    rig = Rig(limit_bytes=1, seed=1)
    stream = rig.stream
    for which in (key(), key(), key(rows=2), key(rows=2)):
        stream.run(partial(rig.graphs.run, which, rig.work))
        if which == key(rows=2):
            continue
        stream.record().wait()
    stream.record().wait()
    assert rig.count("graphs_dropped") == 1
    rig.run(key(rows=2))
    assert not rig.graphs._leaving


def test_without_memory_nothing_is_recorded() -> None:
    rig = Rig(limit_bytes=0)
    for _ in range(4):
        rig.run(key())
    assert (rig.num_launched, len(rig.graphs)) == (4, 0)


@pytest.mark.parametrize(
    "look",
    [
        lambda value: value * float(value[0].item()),
        lambda value: value[value > 0],
        lambda value: value + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda value: value.nonzero(),
        lambda value: value * value.tolist()[0],
    ],
    ids=["item", "mask", "from host", "nonzero", "list"],
)
def test_what_no_capture_takes_is_launched_for_ever(look: Any) -> None:
    rig = Rig()
    rig.work = lambda: look(rig.value)  # type: ignore[method-assign]
    with pytest.raises(CaptureFailed):
        rig.device.capture(rig.work)
    for _ in range(4):
        rig.run(key())
    assert (rig.count("graphs_captured"), rig.count("graphs_refused")) == (0, 1)


def test_what_has_no_key_is_launched_and_counted() -> None:
    rig = Rig()
    for _ in range(3):
        rig.stream.run(lambda: rig.graphs.run(None, rig.work))
    rig.stream.record().wait()
    assert (rig.num_launched, rig.count("steps_not_replayed"), len(rig.graphs)) == (3, 3, 0)


def test_a_model_that_is_refused_is_not_tried_again() -> None:
    """Each capture that a driver breaks off costs memory, and after a few none is begun at all."""
    rig = Rig()
    rig.work = lambda: rig.value * float(rig.value[0].item())  # type: ignore[method-assign]
    for rows in (1, 2, 3, 4):
        for _ in range(3):
            rig.run(key(rows=rows))
    assert rig.count("graphs_refused") == 1
    assert rig.graphs.has_given_up("u", False)
    assert not rig.graphs.has_given_up("v", False)


def test_seen_forms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.gpu.graphs.SEEN_BOUND", 3)
    rig = Rig()
    for rows in range(10):
        rig.run(key(rows=rows))
    assert len(rig.graphs._seen) <= 3


def test_buckets() -> None:
    assert [row_bucket(n, 256) for n in (1, 3, 9, 17, 129, 256)] == [1, 4, 16, 24, 160, 256]
    assert row_bucket(5, 6) == 6
    assert row_bucket(300, 400) == 400
    assert row_bucket(300, 2000) == 512
    assert [width_bucket(n) for n in (1, 16, 17, 64, 65, 1000)] == [16, 16, 64, 64, 256, 1024]


def test_numbers_are_baked_and_addresses_are_read_anew() -> None:
    device, value, factor = FakeDevice(), torch.ones(2), [2.0]
    graph, result = device.capture(lambda: (value.view(2, 1).to(torch.float64) * factor[0]).sum(0))
    assert torch.isnan(result).all(), "a capture computes nothing"
    value.fill_(5)
    factor[0] = 100.0
    graph.replay()
    assert result.tolist() == [20.0]


def test_chunks_that_are_refused_leave_decodes_alone() -> None:
    """What was recorded goes on, and other kinds of steps are still tried."""
    rig = Rig()
    chunks = [
        GraphKey("u", StepForm(rows, 4, 32, rows + 4, (16,), (256,)), (1,), (7,))
        for rows in (1, 2, 4)
    ]
    for _ in range(3):
        rig.run(key())
    capture, refused = rig.device.capture, 0

    def refuse(work: Any) -> Any:
        nonlocal refused
        refused += 1
        raise CaptureFailed("not here")

    rig.device.capture = refuse  # type: ignore[method-assign]
    for which in chunks:
        for _ in range(3):
            rig.run(which)
    rig.device.capture = capture  # type: ignore[method-assign]
    assert refused == 1
    before = rig.count("graph_replays")
    rig.run(key())
    for _ in range(2):
        rig.run(key(rows=2))
    assert rig.count("graph_replays") == before + 2


def test_graphs_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.gpu.graphs.MOST_GRAPHS", 2)
    rig = Rig()
    for rows in (1, 2, 4):
        for _ in range(2):
            rig.run(key(rows=rows))
    assert (len(rig.graphs), rig.count("graphs_dropped")) == (2, 1)


def test_a_device_that_records_nothing_more_is_no_fault_of_the_model() -> None:
    rig = Rig()
    for _ in range(3):
        rig.run(key())

    def ended(work: Any) -> Any:
        raise CapturesEnded("too many")

    rig.device.capture = ended  # type: ignore[method-assign]
    for rows in (2, 4):
        for _ in range(3):
            rig.run(key(rows=rows))
    assert rig.count("graphs_refused") == 0
    before = rig.count("graph_replays")
    rig.run(key())
    assert rig.count("graph_replays") == before + 1
