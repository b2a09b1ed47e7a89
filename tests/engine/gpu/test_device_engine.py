"""The engine on a device with streams says what transformers says, however late the device is.

Mixes of tests/engine/running/test_parity_mixes.py on a fake device (tests/engine/fake_device.py):
steps run when it pleases them, pages are overwritten as soon as their fence has passed, KV and
weights are moved, models swapped through a pinned host tier, decode steps recorded and replayed.
`PLANTED` are errors that a GPU would show as a wrong token now and then; each must be caught here.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from engine.backend.cuda import CudaBackend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu import device_batch, device_runner
from engine.gpu.device_batch import DeviceBatch, DeviceLayOut
from engine.gpu.device_runner import DeviceRunner
from engine.gpu.device_step import InputBuffer
from engine.gpu.graphs import DecodeGraphs
from engine.memory.kv_plan import ChunkTable
from engine.scheduling.step_pipeline import StepPipeline
from tests.engine.device_rig import Poisoner, lazy_device, opened_on
from tests.engine.engine_hooks import poison_what_is_freed
from tests.engine.running.test_parity_mixes import Book, Mix, run_mixes
from tests.engine.tiny_models import TinyModel, make_tiny_models, tiny_configs, windowed_configs

FEW, MANY = 9, 1500
PLANTED_MIXES = 30
PROMPTS = 4


class DeviceMix(Mix):
    """A mix whose device is late."""

    def _open(self, config: EngineConfig, threaded: bool) -> Engine:
        del threaded
        rng = self.rng
        host_bytes = rng.choice((0, 4 << 20))
        config = msgspec.structs.replace(
            config,
            attention_in_place=True,
            host_tier_bytes=host_bytes,
            shm_dir=str(next(iter(self.book.models.values())).pack_dir.parent),
            shm_prefix=f"mix{self.seed}",
        )
        device = lazy_device(rng)
        opened = opened_on(device, config, rng.choice((0, 1 << 14, 1 << 20, 1 << 20)))
        self.device, self.graphs = device, opened.graphs
        self.backend = opened.backend
        opened.backend.arena.fill_(0xFF)
        engine = Engine(config, opened.backend, opened.dependencies)
        poison_what_is_freed(engine, Poisoner(opened))
        return engine

    def run(self) -> Counter[str]:
        events = super().run()
        assert self.graphs is not None
        events.update({name: int(count) for name, count in self.graphs.counters.items()})
        assert not self.device.pinned, "memory of the host tier is still pinned"
        return events


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Four that are fused, two that run by their modules."""
    configs = {**tiny_configs(), **windowed_configs()}
    return make_tiny_models(tmp_path_factory.mktemp("families"), configs)


@pytest.fixture(scope="module")
def book(families: dict[str, TinyModel]) -> Book:
    return Book.of(families, PROMPTS)


def test_greedy_tokens_are_those_of_transformers(book: Book) -> None:
    total = run_mixes(book, range(FEW), DeviceMix)
    assert total["requests"] > 4 * FEW
    for event in ("hit tokens", "preemptions", "graph_replays", "graphs_dropped"):
        assert total[event], event
    assert total["swaps"] > FEW
    assert total["forced weight moves"]
    assert total["forced kv moves"]


def test_no_step_has_a_table_of_an_odd_width(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled anew for a stride that 16 does not divide: a second in the midst."""
    widths: Counter[int] = Counter()
    lay_out = DeviceLayOut.__call__

    def look(self: DeviceLayOut, *args: Any) -> DeviceBatch:
        batch = lay_out(self, *args)
        for group in batch.fields.groups:
            for rows in (group.decode, group.prefill):
                if rows is not None and batch.form is None:
                    widths[rows.chunk.shape[1]] += 1
        return batch

    monkeypatch.setattr(DeviceLayOut, "__call__", look)
    run_mixes(book, range(1), DeviceMix)
    assert widths
    assert not [width for width in widths if width % 16]


@pytest.mark.soak
def test_greedy_tokens_are_those_of_transformers_in_many_mixes(
    families: dict[str, TinyModel],
) -> None:
    total = run_mixes(Book.of(families, 40), range(5000, 5000 + MANY), DeviceMix)
    assert total["ties"] < total["requests"] / 1000


def _fence_early(patch: pytest.MonkeyPatch) -> None:
    """A step counts as ended when it was launched."""
    patch.setattr(CudaBackend, "last_done", lambda self: self._last_launched)


def _inputs_at_once(patch: pytest.MonkeyPatch) -> None:
    """A step's inputs are written when it is laid out, under the step before."""
    bring, make = InputBuffer.bring, InputBuffer.__init__
    launch = StepPipeline.launch
    buffers: list[InputBuffer] = []

    def remember(self: InputBuffer, device: Any) -> None:
        make(self, device)
        buffers[:] = [self]

    def hasty(self: StepPipeline, queue: Any, runner: Any, cache: Any, rows: Any) -> Any:
        lay_out = self._lay_out

        def writing(*args: Any) -> Any:
            batch = lay_out(*args)
            assert isinstance(batch, DeviceBatch)
            for buffer in buffers:
                bring(buffer, batch.packed)
            return batch

        self._lay_out = writing
        try:
            return launch(self, queue, runner, cache, rows)
        finally:
            self._lay_out = lay_out

    patch.setattr(InputBuffer, "__init__", remember)
    patch.setattr(InputBuffer, "bring", lambda self, packed: self._buffer)
    patch.setattr(StepPipeline, "launch", hasty)


def _graphs_without_addresses(patch: pytest.MonkeyPatch) -> None:
    """A graph is found wherever the weights lie by now."""
    run, drop = DecodeGraphs.run, DecodeGraphs.drop

    def careless(self: DecodeGraphs, key: Any, work: Any) -> torch.Tensor:
        return run(self, key._replace(weights=()), work)

    patch.setattr(DecodeGraphs, "run", careless)
    patch.setattr(
        DecodeGraphs, "drop", lambda self, instance_id, but_at=(): drop(self, instance_id, ())
    )


def _graphs_without_forms(patch: pytest.MonkeyPatch) -> None:
    """A graph of other widths is good enough."""
    run = DecodeGraphs.run

    def careless(self: DecodeGraphs, key: Any, work: Any) -> torch.Tensor:
        form = key.form.__class__(key.form.num_rows, ())
        return run(self, key._replace(form=form), work)

    patch.setattr(DecodeGraphs, "run", careless)


def _recorded_but_not_replayed(patch: pytest.MonkeyPatch) -> None:
    """What a capture leaves is taken for a result."""
    run = DecodeGraphs.run

    def careless(self: DecodeGraphs, key: Any, work: Any) -> torch.Tensor:
        kept = self._kept.get(key)
        return run(self, key, work) if kept is None else kept.result

    patch.setattr(DecodeGraphs, "run", careless)


def _tables_stay(patch: pytest.MonkeyPatch) -> None:
    """Moved extents are not told to the device."""
    note = ChunkTable.note_changes

    def forgetful(self: ChunkTable) -> int:
        if self._num_noted:
            self._write()
            self._written.clear()
        return note(self)

    patch.setattr(ChunkTable, "note_changes", forgetful)


def _tables_too_early(patch: pytest.MonkeyPatch) -> None:
    """A step sees the tables as they are when it runs, not as they were when it was laid out."""
    apply = ChunkTable.apply_changes

    def hasty(self: ChunkTable, table: Any, number: int, bring: Any) -> None:
        self.note_changes()
        apply(self, table, self._num_noted, bring)

    patch.setattr(ChunkTable, "apply_changes", hasty)


def _tokens_not_filled_in(patch: pytest.MonkeyPatch) -> None:
    """What the step before has sampled never arrives."""
    patch.setattr(device_runner, "_fill_in", lambda step, sampled: None)


def _results_not_brought_back(patch: pytest.MonkeyPatch) -> None:
    """The host reads its buffer as it was before the copy."""

    def uncopied(device: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    patch.setattr(device_runner, "bring_back", uncopied)


def _weights_not_rebound(patch: pytest.MonkeyPatch) -> None:
    """Moved weights are read where they were."""
    bind = DeviceRunner.bind

    def once(self: DeviceRunner, tensors: Any, generation: int) -> None:
        if self._generation is None:
            bind(self, tensors, generation)

    patch.setattr(DeviceRunner, "bind", once)


def _padding_writes(patch: pytest.MonkeyPatch) -> None:
    """Padding tokens have a place in the cache."""
    padded = device_batch._padded

    def wrong(values: Any, length: int, filler: int) -> Any:
        return padded(values, length, max(filler, 0))

    patch.setattr(device_batch, "_padded", wrong)


PLANTED: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    _fence_early,
    _inputs_at_once,
    _graphs_without_addresses,
    _graphs_without_forms,
    _recorded_but_not_replayed,
    _tables_stay,
    _tables_too_early,
    _tokens_not_filled_in,
    _results_not_brought_back,
    _weights_not_rebound,
    _padding_writes,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, book: Book
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)) as caught:
        run_mixes(book, range(PLANTED_MIXES), DeviceMix)
    print(f"{plant.__name__}: {caught.value!r:.200}")
