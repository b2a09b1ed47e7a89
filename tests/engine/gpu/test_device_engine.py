"""The engine on a device with streams says what transformers says, however late the device is.

Mixes of tests/engine/running/test_parity_mixes.py on a fake device (tests/engine/fake_device.py):
steps run when it pleases them, pages are overwritten as soon as their fence has passed, KV and
weights are moved, models swapped through a pinned host tier, steps recorded and replayed: decodes,
and those with chunks of prompts.
`PLANTED` are errors that a GPU would show as a wrong token now and then; each must be caught here.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from engine.gpu.device_step import DeviceStep, InputBuffer
from engine.gpu.graphs import GraphKey, StepGraphs
from engine.memory import RequestKv
from engine.memory.extent_plan import ChunkTable
from engine.memory.policy.kv_value import ValueParams
from engine.scheduling.step_pipeline import StepPipeline
from tests.engine.device_rig import Poisoner, lazy_device, opened_on
from tests.engine.engine_hooks import poison_what_is_freed
from tests.engine.running.test_parity_mixes import Book, Mix, run_mixes
from tests.engine.tiny_models import (
    TinyModel,
    make_tiny_models,
    state_configs,
    tiny_configs,
    windowed_configs,
)

FEW, MANY = 9, 1500
NARROW = 16  # blocks of a chunk's table, so that contexts of tests come in several widths
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
        opened = opened_on(device, config, rng.choice((0, 1 << 14, 1 << 20, 1 << 23)))
        self.device, self.graphs = device, opened.graphs
        self._count_replays()
        self.backend = opened.backend
        opened.backend.arena.fill_(0xFF)
        engine = Engine(config, opened.backend, opened.dependencies)
        poison_what_is_freed(engine, Poisoner(opened))
        return engine

    def _count_replays(self) -> None:
        assert self.graphs is not None
        counters, run = self.graphs.counters, self.graphs.run

        def counting(key: GraphKey | None, work: Callable[[], torch.Tensor]) -> torch.Tensor:
            before = counters["graph_replays"]
            result = run(key, work)
            if key is not None and key.form.num_chunks:
                self.events["mixed replays"] += int(counters["graph_replays"] - before)
            return result

        self.graphs.run = counting  # type: ignore[method-assign]

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


@pytest.fixture(autouse=True)
def _narrow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "FIRST_CHUNK_WIDTH", NARROW)


def test_greedy_tokens_are_those_of_transformers(book: Book) -> None:
    total = run_mixes(book, range(FEW), DeviceMix)
    assert total["requests"] > 4 * FEW
    for event in ("hit tokens", "preemptions", "graph_replays", "mixed replays", "graphs_dropped"):
        assert total[event], event
    assert total["swaps"] > FEW
    assert total["forced weight moves"]
    assert total["forced kv moves"]
    assert not total["graphs_refused"]


def test_models_that_keep_states_say_what_transformers_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(ValueParams, snapshot_tokens=4)
    monkeypatch.setattr("engine.memory.kv_cache.ValueParams", few)
    book = Book.of(make_tiny_models(tmp_path, state_configs()), PROMPTS)
    total = run_mixes(book, range(FEW), DeviceMix)
    assert total["requests"] > 4 * FEW
    for event in ("hit tokens", "swaps", "forced kv moves"):
        assert total[event], event
    assert not total["graph_replays"], "mixers take rows as they come"


def test_a_layer_with_heads_of_its_own_is_launched_one_by_one(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles are no input of the step, and a capture takes no memory from the host."""
    monkeypatch.setattr(device_runner, "cut_of", lambda plan, num_heads, device: 3)
    total = run_mixes(book, range(FEW), DeviceMix)
    assert total["graphs_refused"]
    assert total["graph_replays"]
    assert not total["mixed replays"]


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
    monkeypatch.setattr("engine.gpu.device_batch.TOKEN_BUCKETS", ())
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
    run, drop = StepGraphs.run, StepGraphs.drop

    def careless(self: StepGraphs, key: Any, work: Any) -> torch.Tensor:
        return run(self, key and key._replace(weights=()), work)

    patch.setattr(StepGraphs, "run", careless)
    patch.setattr(
        StepGraphs, "drop", lambda self, instance_id, but_at=(): drop(self, instance_id, ())
    )


def _graphs_without_widths(patch: pytest.MonkeyPatch) -> None:
    """A graph of other widths is good enough."""
    _graphs_but_for(patch, widths=())


def _graphs_but_for(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Part of a key is left out."""
    run = StepGraphs.run

    def careless(self: StepGraphs, key: Any, work: Any) -> torch.Tensor:
        if key is not None:
            key = key._replace(form=replace(key.form, **changes))
        return run(self, key, work)

    patch.setattr(StepGraphs, "run", careless)


def _recorded_but_not_replayed(patch: pytest.MonkeyPatch) -> None:
    """What a capture leaves is taken for a result."""
    run = StepGraphs.run

    def careless(self: StepGraphs, key: Any, work: Any) -> torch.Tensor:
        kept = self._kept.get(key)
        return run(self, key, work) if kept is None else kept.result

    patch.setattr(StepGraphs, "run", careless)


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


def _laid_out(
    patch: pytest.MonkeyPatch, mixed: bool, spoil: Callable[[DeviceBatch, torch.Tensor], None]
) -> None:
    """`spoil` is given the steps that are recorded, with chunks or without, and their inputs."""
    lay_out = DeviceLayOut.__call__

    def wrong(self: DeviceLayOut, *args: Any) -> DeviceBatch:
        batch = lay_out(self, *args)
        if batch.form is not None and bool(batch.form.num_chunks) == mixed:
            spoil(batch, batch.packed)
        return batch

    patch.setattr(DeviceLayOut, "__call__", wrong)


def _place_padding(batch: DeviceBatch, packed: torch.Tensor) -> None:
    for group in batch.fields.groups:
        group.token_chunk.of(packed)[batch.num_tokens :] = 0
        group.token_slot.of(packed)[batch.num_tokens :] = 0


def _padding_writes(patch: pytest.MonkeyPatch) -> None:
    """Padding tokens of decodes have a place in the cache."""
    _laid_out(patch, False, _place_padding)


def _mixed_padding_writes(patch: pytest.MonkeyPatch) -> None:
    """Padding tokens of mixed steps have a place in the cache."""
    _laid_out(patch, True, _place_padding)


def _padding_rows_decode_a_token(patch: pytest.MonkeyPatch) -> None:
    """Padding rows of one token write their zeros where a chunk's last token is."""

    def spoil(batch: DeviceBatch, packed: torch.Tensor) -> None:
        for group in batch.fields.groups:
            if group.decode is not None:
                starts = group.decode.q_start.of(packed)
                starts[starts >= batch.num_tokens] = batch.num_tokens - 1

    _laid_out(patch, True, spoil)


def _too_few_tiles(patch: pytest.MonkeyPatch) -> None:
    """Only as many tiles as full ones would be."""
    tiles = device_batch._tiles

    def wrong(flat: Any, step: int, form: Any) -> Any:
        found = tiles(flat, step, form)
        return found if form is None else found[: max(1, len(flat.ids) // step)]

    patch.setattr(device_batch, "_tiles", wrong)


def _graphs_without_tokens(patch: pytest.MonkeyPatch) -> None:
    """A graph of fewer or more tokens is good enough."""
    _graphs_but_for(patch, num_tokens=0)


def _graphs_without_chunk_widths(patch: pytest.MonkeyPatch) -> None:
    """A graph of other widths of chunks is good enough."""
    _graphs_but_for(patch, chunk_widths=())


def _tables_of_moved_blocks_stay(patch: pytest.MonkeyPatch) -> None:
    """Blocks that were moved are not written into the tables that are kept from step to step."""

    def forgetful(self: RequestKv) -> None:
        self._arrays.clear()

    patch.setattr(RequestKv, "rewritten", forgetful)


def _logits_in_the_order_of_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows that sample are not first."""
    lay = device_batch._Flat.__init__

    def wrong(self: Any, rows: Any) -> None:
        lay(self, rows)
        self.logit_index.sort()

    patch.setattr(device_batch._Flat, "__init__", wrong)


def _logits_of_the_recording(patch: pytest.MonkeyPatch) -> None:
    """The places of the logits are those of the step that was recorded."""
    make = DeviceStep.__init__

    def wrong(self: DeviceStep, *args: Any) -> None:
        make(self, *args)
        if self.logit_index is not None:
            self.logit_index = self.logit_index.clone()

    patch.setattr(DeviceStep, "__init__", wrong)


PLANTED: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    _fence_early,
    _inputs_at_once,
    _graphs_without_addresses,
    _graphs_without_widths,
    _graphs_without_chunk_widths,
    _graphs_without_tokens,
    _recorded_but_not_replayed,
    _tables_stay,
    _tables_too_early,
    _tokens_not_filled_in,
    _results_not_brought_back,
    _weights_not_rebound,
    _padding_writes,
    _mixed_padding_writes,
    _padding_rows_decode_a_token,
    _too_few_tiles,
    _tables_of_moved_blocks_stay,
    _logits_in_the_order_of_rows,
    _logits_of_the_recording,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, book: Book
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)) as caught:
        run_mixes(book, range(PLANTED_MIXES), DeviceMix)
    print(f"{plant.__name__}: {caught.value!r:.200}")
