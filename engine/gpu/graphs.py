"""Recorded steps: kept by the addresses they were recorded at, bounded, the oldest go first.

A graph holds addresses: of weights, of the table of chunks, of the buffer that inputs come in. So
its key has them all, and one that would read anything else is never found. Weights that come back
to where they were find their graphs again; those of other places go when a model is bound anew.

    first time      launched one by one: kernels are compiled, libraries set up
    second time     recorded, then replayed
    ever after      replayed

What graphs may take beside the arena is bounded (`limit_bytes`): the least recently used goes, once
its last replay has ended. A step that cannot be recorded is not tried again at the same addresses,
nor are a model's steps of that kind (decodes, steps with chunks) once one was refused:
an interrupted capture costs the driver. Steps that were launched one by one, for whatever reason,
are counted.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from engine.backend import Device, Event, Graph
from engine.errors import CaptureFailed, CapturesEnded
from engine.gpu.device_batch import StepForm

SEEN_BOUND = 4096
"""Keys remembered without a graph; beyond it all of them are forgotten."""

MOST_GRAPHS = 1024
"""Kept at once; each takes memory of the host, too: a few hundred kernels with their arguments."""

logger = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """What a graph is good for."""

    instance_id: str
    form: StepForm
    weights: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Kept:
    graph: Graph
    result: torch.Tensor
    last_replay: Event | None = None


class StepGraphs:
    """All graphs of one device. Used in the order of the steps only."""

    def __init__(self, device: Device, limit_bytes: int, mark: Callable[[], Event]) -> None:
        """`mark`: an event behind what was handed over last."""
        self._device = device
        self._limit_bytes = limit_bytes
        self._mark = mark
        self._kept: OrderedDict[GraphKey, _Kept] = OrderedDict()
        self._seen: dict[GraphKey, Literal["once", "never"]] = {}
        self._leaving: list[_Kept] = []
        self._refused: set[tuple[str, bool]] = set()
        self._has_ended = False
        self.counters = {
            "graphs_captured": 0.0,
            "graphs_dropped": 0.0,
            "graphs_refused": 0.0,
            "graph_replays": 0.0,
            "steps_not_replayed": 0.0,
        }

    @property
    def num_bytes(self) -> int:
        """Of the graphs kept."""
        return sum(kept.graph.num_bytes for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, key: GraphKey | None, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `work`: launched, or of its graph. It is good until the next call.

        `key` None: a step that is not recorded.
        """
        self._bury()
        kept = None if key is None else self._kept.get(key) or self._record(key, work)
        if key is None or kept is None:
            self.counters["steps_not_replayed"] += 1
            return work()
        self._kept.move_to_end(key)
        kept.graph.replay()
        kept.last_replay = self._mark()
        self.counters["graph_replays"] += 1
        return kept.result

    def has_given_up(self, instance_id: str, has_chunks: bool) -> bool:
        """Whether no steps of this model and kind are recorded any more, and none is kept."""
        if self._may_record((instance_id, has_chunks)):
            return False
        kinds = {(key.instance_id, bool(key.form.num_chunks)) for key in self._kept}
        return (instance_id, has_chunks) not in kinds

    def drop(self, instance_id: str, but_at: tuple[int, ...] = ()) -> None:
        """Those of a model that were recorded with its weights elsewhere than `but_at`."""
        for key in [k for k in self._kept if k.instance_id == instance_id and k.weights != but_at]:
            self._drop(key)
        for key in [k for k in self._seen if k.instance_id == instance_id and k.weights != but_at]:
            del self._seen[key]

    def _record(self, key: GraphKey, work: Callable[[], torch.Tensor]) -> _Kept | None:
        seen, kind = self._seen.get(key), (key.instance_id, bool(key.form.num_chunks))
        if seen != "once" or not self._may_record(kind):
            if len(self._seen) >= SEEN_BOUND:
                self._seen.clear()
            self._seen.setdefault(key, "once")
            return None
        try:
            graph, result = self._device.capture(work)
        except CapturesEnded as error:
            logger.warning(
                "no more steps are recorded, new forms are launched one by one: %s", error
            )
            self._has_ended = True
            return None
        except CaptureFailed as error:
            logger.warning(
                "cannot record steps of %s, they are launched one by one: %s",
                key.instance_id,
                error,
            )
            self._seen[key] = "never"
            self.counters["graphs_refused"] += 1
            self._refused.add(kind)
            return None
        del self._seen[key]
        self.counters["graphs_captured"] += 1
        kept = self._kept[key] = _Kept(graph, result)
        while len(self._kept) > 1 and (
            self.num_bytes > self._limit_bytes or len(self._kept) > MOST_GRAPHS
        ):
            self._drop(next(iter(self._kept)))
        return kept

    def _may_record(self, kind: tuple[str, bool]) -> bool:
        return bool(self._limit_bytes) and not self._has_ended and kind not in self._refused

    def _drop(self, key: GraphKey) -> None:
        self._leaving.append(self._kept.pop(key))
        self.counters["graphs_dropped"] += 1

    def _bury(self) -> None:
        """A graph is not destroyed under its own replay."""
        self._leaving = [
            kept
            for kept in self._leaving
            if kept.last_replay is not None and not kept.last_replay.done()
        ]
