"""The stamp runner itself: it writes where the kernels read, and sees every kind of damage.

A check that cannot fail proves nothing, so each thing it is there to find is done to it here.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.memory.page_pool import PagePool
from engine.pack import read_index
from engine.packs.weights import build_views
from engine.protocol import SamplingParams, Submit
from engine.request import Request
from engine.running.batch import ScheduledRow, StepBatch, build_batch
from kernels.paged_attention import gather_kv_ref
from tests.engine.stamp_packs import random_shape, stamp_pack
from tests.engine.stamp_runner import StampLog, StampRunner

PAGE = 4096
BLOCK = 4
NUM_PAGES = 600


class Bench:
    """A runner with a few requests, stepped by hand."""

    def __init__(self, folder: Path, seed: int, stateful: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.shape = random_shape(self.rng, PAGE, BLOCK, stateful=stateful)
        self.pack = stamp_pack(folder / "pack", self.shape, seed)
        index = read_index(self.pack)
        self.pool = PagePool(NUM_PAGES, PAGE)
        self.arena = torch.full((NUM_PAGES * PAGE,), 0xFF, dtype=torch.uint8)
        self.log = StampLog()
        self.runner = StampRunner(
            "u", self.pack, index, self.arena, self.pool, BLOCK, True, 0, self.log, self.rng
        )
        owner = self.runner.cache.owner
        runs = [
            self.pool.alloc_run(type(owner)("u", "weights"), -(-size // PAGE))
            for size in self.shape.segment_bytes
        ]
        blob = np.fromfile(self.pack / "weights.bin", dtype=np.uint8)
        for run, segment in zip(runs, index.segments, strict=True):
            content = blob[segment.offset : segment.offset + segment.num_bytes]
            start = run.first * PAGE
            self.arena[start : start + segment.num_bytes] = torch.from_numpy(content)
        self.weights_at = runs[0].first * PAGE
        self.views = build_views(self.arena, index, [run.first * PAGE for run in runs], 1)
        self.runner.bind(self.views.tensors, 1)
        self.requests = [self._request(i) for i in range(3)]

    def _request(self, number: int) -> Request:
        length = self.rng.randint(24, self.shape.max_context - 8)  # some steps of chunks
        prompt = [self.rng.randrange(self.shape.vocab_size) for _ in range(length)]
        submit = Submit(f"r{number}", 1, "t", "m", prompt, 8, SamplingParams(0.0), [])
        request = Request.of(submit, 0.0)
        request.kv = self.runner.cache.new_kv("t")
        return request

    def batch(self) -> StepBatch:
        """A chunk of each request, or its next token."""
        rows = []
        for request in self.requests:
            assert request.kv is not None
            count = min(self.rng.choice((1, 3, 9)), request.num_uncomputed)
            first = request.num_computed
            self.runner.cache.reserve(request.kv, first + count)
            self.runner.cache.begin_row(request.kv, first, first + count, 0.0)
            rows.append(ScheduledRow(request, count))
        return build_batch(rows, self.runner.cache, torch.device("cpu"))

    def step(self) -> StepBatch:
        """One step that goes well."""
        batch = self.batch()
        tokens = self.runner.execute(batch).token_ids.tolist()
        for row in batch.rows:
            row.request.num_computed = row.end
        for row, token in zip(batch.sampling_rows, tokens, strict=True):
            row.request.token_ids.append(token)
        for request in self.requests:
            assert request.kv is not None
            self.runner.cache.advance(request.kv, request.token_ids, request.num_computed, 0.0)
        return batch

    def address(self, batch: StepBatch, layer: int, token: int) -> int:
        """Byte of the arena where a token's K begins in a layer of the first group."""
        group, paged = batch.plan.groups[0], batch.groups[0]
        unit = paged.table[layer, paged.token_chunk[token]]
        unit = unit + paged.token_slot[token] * group.block.block_units
        unit = unit + paged.token_offset[token] * group.block.k_row_units
        return int(unit) * group.block.unit_bytes


@pytest.mark.parametrize("seed", range(12))
def test_stamps_lie_where_the_kernels_read(tmp_path: Path, seed: int) -> None:
    bench = Bench(tmp_path, seed)
    for _ in range(6):
        batch = bench.step()
    assert not bench.log.wrong
    words = bench.arena
    for g, (group, paged) in enumerate(zip(batch.plan.groups, batch.groups, strict=True)):
        stamps = bench.runner._groups[g]
        for rows in paged.rows:
            for place in range(len(group.layers)):
                key, value = gather_kv_ref(words, group.block, paged.table[place], rows)
                parts = (key,) if group.block.layer.v_in_k else (key, value)
                for i, start in enumerate(rows.token_index[:, 0].tolist()):
                    row = next(r for r in batch.rows if _start(batch, r) == start)
                    story = bench.runner.oracle.story(row.request.submit.prompt_token_ids, 8)
                    last = row.end - 1
                    at = last - int(rows.first[i])
                    wanted = stamps.stamps(story.chain[last : last + 1])[place, 0]
                    for part, (_, constants, _) in zip(parts, stamps._parts, strict=True):
                        found = part[i, :, at].contiguous().view(torch.uint8).numpy()
                        assert (found.view(np.uint64) == (wanted ^ constants)).all()


def _start(batch: StepBatch, row: ScheduledRow) -> int:
    return sum(other.num_scheduled_tokens for other in batch.rows[: batch.rows.index(row)])


def test_answers_are_a_function_of_the_prefix_and_the_pack(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 3)
    while any(len(request.token_ids) < request.num_prompt + 4 for request in bench.requests):
        bench.step()
    for request in bench.requests:
        prompt = request.submit.prompt_token_ids
        expected = bench.runner.oracle.answer(prompt, 8)
        said = request.token_ids[request.num_prompt :]
        assert said[:8] == expected[: len(said)]
        longer = bench.runner.oracle.answer([*prompt, *expected[:3]], 4)
        assert longer == bench.runner.oracle.answer(prompt, 7)[3:]
    assert not bench.log.wrong


def overwrite_kv(bench: Bench, batch: StepBatch) -> None:
    """One byte of a position that is still seen, in the last layer of the first group."""
    layer = len(batch.plan.groups[0].layers) - 1
    bench.arena[bench.address(batch, layer, batch.num_tokens - 1)] ^= 1


def overwrite_weights(bench: Bench, batch: StepBatch) -> None:
    bench.arena[bench.weights_at + 5] ^= 1
    bench.log.num_steps = 63  # the next step looks at all of them


def feed_another_token(bench: Bench, batch: StepBatch) -> None:
    bench.requests[0].token_ids[bench.requests[0].num_computed] ^= 1


def swap_blocks(bench: Bench, batch: StepBatch) -> None:
    first, second = bench.requests[0].kv, bench.requests[1].kv
    assert first is not None
    assert second is not None
    first.tables[0][-1], second.tables[0][-1] = second.tables[0][-1], first.tables[0][-1]
    first.rewritten()
    second.rewritten()


def forget_a_position(bench: Bench, batch: StepBatch) -> None:
    bench.requests[0].num_computed += 1


@pytest.mark.parametrize(
    "damage",
    [overwrite_kv, overwrite_weights, feed_another_token, swap_blocks, forget_a_position],
)
@pytest.mark.parametrize("seed", [1, 5, 8])
def test_damage_is_seen(
    tmp_path: Path, seed: int, damage: Callable[[Bench, StepBatch], None]
) -> None:
    bench = Bench(tmp_path, seed)
    for _ in range(2):
        batch = bench.step()
    assert not bench.log.wrong
    damage(bench, batch)
    bench.runner.execute(bench.batch())
    assert bench.log.wrong


def overwrite_a_state(bench: Bench, batch: StepBatch) -> None:
    states = batch.states[0]
    row = len(batch.rows) - 1
    unit = int(states.table[-1, states.write_chunk[row]])
    plan = batch.plan.states[0]
    place = unit * plan.unit_bytes + int(states.write_slot[row]) * plan.block_bytes
    bench.arena[place + plan.block_bytes - 1] ^= 1


def swap_slots(bench: Bench, batch: StepBatch) -> None:
    first, second = bench.requests[0].kv, bench.requests[1].kv
    assert first is not None
    assert second is not None
    first.states.slots[0], second.states.slots[0] = second.states.slots[0], first.states.slots[0]


def share_a_slot(bench: Bench, batch: StepBatch) -> None:
    first, second = bench.requests[0].kv, bench.requests[1].kv
    assert first is not None
    assert second is not None
    first.states.slots[0] = second.states.slots[0]


def compute_a_token_twice(bench: Bench, batch: StepBatch) -> None:
    bench.requests[0].num_computed -= 1


@pytest.mark.parametrize(
    "damage", [overwrite_a_state, swap_slots, share_a_slot, compute_a_token_twice]
)
@pytest.mark.parametrize("seed", [1, 5, 8])
def test_damage_to_states_is_seen(
    tmp_path: Path, seed: int, damage: Callable[[Bench, StepBatch], None]
) -> None:
    bench = Bench(tmp_path, seed, stateful=1.0)
    for _ in range(2):
        batch = bench.step()
    assert bench.log.num_states
    assert not bench.log.wrong
    damage(bench, batch)
    bench.runner.execute(bench.batch())
    assert bench.log.wrong


def test_writing_to_one_place_twice_is_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 2)
    bench.step()
    batch = bench.batch()
    batch.groups[0].token_chunk[:] = batch.groups[0].token_chunk[0]
    batch.groups[0].token_slot[:] = batch.groups[0].token_slot[0]
    batch.groups[0].token_offset[:] = 0
    bench.runner.execute(batch)
    assert bench.log.wrong


@pytest.mark.parametrize("fault", ["raise", "memory", "shape"])
def test_a_planned_fault_spoils_only_what_its_step_writes(tmp_path: Path, fault: str) -> None:
    bench = Bench(tmp_path, 4)
    bench.step()
    others = bench.requests[1:]
    bench.requests = bench.requests[:1]
    bench.log.faults.append(fault)  # type: ignore[arg-type]
    with pytest.raises((RuntimeError, MemoryError, IndexError), match="planned"):
        bench.runner.execute(bench.batch())
    assert bench.log.faulted == {bench.requests[0].submit.request_id}
    bench.requests = others
    bench.step()
    assert not bench.log.wrong


def test_broken_rows_are_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 6)
    bench.requests = [bench.requests[0]]
    while bench.requests[0].num_uncomputed > 1:
        bench.step()
    bench.log.faults.append("broken")
    output = bench.runner.execute(bench.batch())
    assert output.broken.tolist() == [True]
    assert output.unsampled_broken is not None
    assert not len(output.unsampled_broken)
    assert bench.log.faulted == {bench.requests[0].submit.request_id}
