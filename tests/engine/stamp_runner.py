"""A runner that computes no model but proves memory: it writes stamps as KV and reads all of them.

A stamp is a 64-bit hash of (pack, the request's tokens up to a position, layer, position). A step
writes the stamps of its tokens where a model would write K and V, then reads every position its
rows may attend to and compares. So a block shared wrongly, read after it was freed, moved without
its table, or written twice shows in the very step that would have computed nonsense. The next token
is a hash of the prefix, so what a request should answer is known beforehand.

The addressing here is written from the text in `kernels/paged_attention.py`, not with its code, and
handles all layers of a group at once; `test_stamp_runner.py` holds the two together.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.memory.kv_cache import KvCache
from engine.memory.kv_plan import KvPlan
from engine.memory.page_pool import Owner, PagePool
from engine.memory.policy.kv_value import ValueParams
from engine.pack import BLOB_NAME, PackIndex
from engine.running.batch import StepBatch
from engine.sampling.sampler import SampleOutput
from kernels.paged_attention import BlockGeometry, PagedBatch, Rows
from kernels.state_rows import StateBatch
from tests.engine.stamp_states import StateStamps

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Fault = Literal["raise", "memory", "shape", "broken"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
WORD_BYTES = 8
REGION_BYTES = 512
WHOLE_CHECK_EVERY = 64
SNAPSHOT_TOKENS = 6
"""Contexts are short here."""


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(value: U64) -> U64:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _constants(num: int, salt: int) -> U64:
    return np.array([mix(_GOLDEN * (i + 1) + salt) for i in range(num)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Story:
    """A prompt and how it goes on. `chain[p]` stands for the tokens up to position p."""

    token_ids: tuple[int, ...]
    chain: U64


class Oracle:
    """What a pack's model says. Two packs say different things."""

    def __init__(self, index: PackIndex) -> None:
        self.seed = mix(int(index.revision, 16))
        self.vocab_size = index.vocab_size
        self._told: dict[tuple[tuple[int, ...], int], Story] = {}

    def story(self, prompt: Sequence[int], num_new: int) -> Story:
        """The prompt and `num_new` tokens after it."""
        key = (tuple(prompt), num_new)
        known = self._told.get(key)
        if known is not None:
            return known
        if len(self._told) > 4096:
            self._told.clear()
        tokens = list(prompt)
        chain: list[int] = []
        state = self.seed
        for position in range(len(prompt) + num_new):
            if position == len(tokens):
                tokens.append(self.next_token(state))
            state = mix(state ^ (_GOLDEN * (tokens[position] + 1)))
            chain.append(state)
        story = Story(tuple(tokens), np.array(chain, dtype=np.uint64))
        self._told[key] = story
        return story

    def answer(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """The tokens after the prompt."""
        return list(self.story(prompt, num_new).token_ids[len(prompt) :])

    def next_token(self, chain: int) -> int:
        """The token after a prefix."""
        return (mix(chain + _GOLDEN) >> 20) % self.vocab_size


@dataclass(slots=True)
class StampLog:
    """Shared by all runners of an engine: what was wrong, how much was looked at, planned faults.

    A mismatch is written down and not raised: the engine would take it for a failure of the model.
    """

    wrong: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    faulted: set[str] = field(default_factory=set)
    """Requests whose KV a planned fault has spoilt: they must end with an error."""
    num_steps: int = 0
    num_positions: int = 0
    num_states: int = 0
    num_weight_checks: int = 0
    num_faults: int = 0

    def note(self, text: str) -> None:
        """One thing that is wrong."""
        if len(self.wrong) < 20:
            self.wrong.append(text)


class GroupStamps:
    """Stamps of one layer group: what lies where, and what should."""

    def __init__(self, layers: Sequence[int], geometry: BlockGeometry, arena: torch.Tensor) -> None:
        heads, tokens = geometry.layer.num_kv_heads, geometry.block_tokens
        size = geometry.dtype.itemsize
        self.layers = tuple(layers)
        self.window = geometry.layer.window
        self.block_tokens = tokens
        self._geometry = geometry
        self._layer_salt = _mix_array(np.array(layers, dtype=np.uint64) + np.uint64(_GOLDEN))
        self._unit_words = geometry.unit_bytes // WORD_BYTES
        assert self._unit_words, "stamps need rows of whole 8 bytes"
        self._words = arena.numpy().view(np.uint64)
        self._parts: list[tuple[int, U64, NDArray[np.int64]]] = []
        start = 0
        parts = [(1, geometry.layer.k_dim)]
        if not geometry.layer.v_in_k:
            parts.append((2, geometry.layer.v_dim))
        for salt, dim in parts:
            row_words = dim * size // WORD_BYTES
            constants = _constants(heads * row_words, salt).reshape(heads, row_words)
            # Where position 0's words lie: head h, word w.
            head = np.arange(heads)[:, None] * (tokens * row_words)
            place = start + head + np.arange(row_words)[None, :]
            self._parts.append((row_words, constants, place))
            start += heads * tokens * row_words
        self._block_words = start
        num_starts = (len(self._words) - start) // self._unit_words + 1
        # A block may start at every unit: overlapping windows, only ever read.
        self._windows = np.lib.stride_tricks.as_strided(
            self._words,
            (num_starts, start),
            (geometry.unit_bytes, WORD_BYTES),
            writeable=False,
        )

    def stamps(self, chain: U64) -> U64:
        """[layers, *chain.shape]"""
        salt = self._layer_salt.reshape(-1, *(1,) * chain.ndim)
        return _mix_array(chain[None] ^ salt)

    def write(self, table: I64, chunk: I64, slot: I64, offset: I64, stamps: U64) -> None:
        """stamps [layers, T] into the K and V of T tokens."""
        base = (table[:, chunk] + slot * self._geometry.block_units) * self._unit_words
        for row_words, constants, place in self._parts:
            start = base + offset * row_words
            self._words[start[:, :, None, None] + place] = stamps[:, :, None, None] ^ constants

    def wrong(self, table: I64, chunk: I64, slot: I64, stamps: U64, seen: NDArray[np.bool_]) -> I64:
        """Places [n, 3] (layer of the group, row, position in the row's table) that differ.

        chunk, slot [rows, blocks]; stamps [layers, rows, blocks * block_tokens]; seen
        [rows, blocks * block_tokens]: what a query of the row may look at.
        """
        geometry = self._geometry
        base = table[:, chunk] + slot * geometry.block_units
        found = self._windows[base]
        layers, rows, blocks = base.shape
        tokens, heads = geometry.block_tokens, geometry.layer.num_kv_heads
        wanted = stamps.reshape(layers, rows, blocks, 1, tokens, 1)
        bad = np.zeros((layers, rows, blocks, tokens), dtype=bool)
        start = 0
        for row_words, constants, _ in self._parts:
            end = start + heads * tokens * row_words
            part = found[..., start:end].reshape(layers, rows, blocks, heads, tokens, row_words)
            differs = part != (wanted ^ constants[:, None, :])
            bad |= differs.any(axis=(3, 5))
            start = end
        flat = bad.reshape(layers, rows, blocks * tokens) & seen
        return np.argwhere(flat)


@dataclass(frozen=True, slots=True)
class _Laid:
    """A row of a step: its chain up to its last token, and where it begins."""

    name: str
    chain: U64
    first: int
    start: int


class StampRunner:
    """Implements `backend.base.Runner`."""

    def __init__(
        self,
        instance_id: str,
        pack_dir: Path,
        index: PackIndex,
        arena: torch.Tensor,
        pool: PagePool,
        block_tokens: int,
        caching: bool,
        max_chunk: int,
        log: StampLog,
        rng: random.Random,
    ) -> None:
        self.instance_id = instance_id
        self.index = index
        plan = KvPlan.of(index, block_tokens, pool)
        owner, params = Owner(instance_id, "kv"), ValueParams(snapshot_tokens=SNAPSHOT_TOKENS)
        self.cache = KvCache(owner, plan, pool, arena.device, caching, max_chunk, params)
        self.oracle = Oracle(index)
        self._log = log
        self._rng = rng
        self._blob = np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8)
        self._tensors: dict[str, torch.Tensor] | None = None
        self._all_new = False
        self._groups = [GroupStamps(g.layers, g.block, arena) for g in plan.groups]
        self._states = [StateStamps(state, arena) for state in plan.states]

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """The weights have come or moved: every byte must be the pack's.

        Looked at by the next step, because a move is only as far as the device is.
        """
        self._tensors = tensors
        self._all_new = True

    def unbind(self) -> None:
        """Forget the weights and give all KV pages back."""
        self._tensors = None
        self.cache.drop_all()

    def execute(self, batch: StepBatch) -> SampleOutput:
        """Write, read, compare; the next tokens."""
        self._log.num_steps += 1
        if self._tensors is None:
            self._log.note(f"{self.instance_id} runs without weights")
        whole, self._all_new = self._all_new, False
        self._check_weights(whole or self._log.num_steps % WHOLE_CHECK_EVERY == 0)
        laid = self._lay_out(batch)
        fault = self._log.faults.pop() if self._log.faults else None
        if fault is not None:
            self._spoil(laid, fault)
        for group, paged in zip(self._groups, batch.groups, strict=True):
            self._write(group, paged, laid)
            self._read(group, paged, laid)
        for stamps, states in zip(self._states, batch.states, strict=True):
            self._pass_states(stamps, states, laid)
        if fault == "raise":
            raise RuntimeError("planned: the step failed")
        if fault == "memory":
            raise MemoryError("planned: no memory for activations")
        if fault == "shape":
            raise IndexError("planned: an impossible shape")
        return self._sample(batch, laid, broken=fault == "broken")

    def _spoil(self, laid: Sequence[_Laid], fault: Fault) -> None:
        """Whose KV this step writes wrongly: everybody's, or that of some rows with broken logits,
        chunks of prompts among them.

        Whoever is spoilt is looked at no more; the engine has to end it and keep nothing of it.
        """
        self._log.num_faults += 1
        if fault != "broken":
            self._log.faulted.update(row.name for row in laid)
            return
        names = [row.name for row in laid]
        self._log.faulted.update(self._rng.sample(names, self._rng.randint(1, len(names))))

    def _lay_out(self, batch: StepBatch) -> list[_Laid]:
        """The rows as the batch has them, held against what their requests must say."""
        ids, positions = batch.input_ids[0].tolist(), batch.position_ids[0].tolist()
        laid: list[_Laid] = []
        start = 0
        for row in batch.rows:
            submit = row.request.submit
            story = self.oracle.story(submit.prompt_token_ids, submit.max_tokens)
            end = start + row.num_scheduled_tokens
            first, last = positions[start], positions[end - 1]
            if positions[start:end] != list(range(first, last + 1)):
                self._log.note(f"{submit.request_id}: positions {positions[start:end]}")
            wanted = story.token_ids[first : last + 1]
            # What goes on for one step after a broken one is given a token that means nothing.
            if tuple(ids[start:end]) != wanted and submit.request_id not in self._log.faulted:
                self._log.note(
                    f"{submit.request_id}: fed {ids[start:end]} at {first}, not {wanted}"
                )
            laid.append(_Laid(submit.request_id, story.chain[: last + 1], first, start))
            start = end
        if start != len(ids):
            self._log.note(f"{len(ids)} tokens in the batch, {start} in its rows")
        return laid

    def _write(self, group: GroupStamps, paged: PagedBatch, laid: Sequence[_Laid]) -> None:
        chunk, slot = paged.token_chunk.numpy(), paged.token_slot.numpy()
        offset = paged.token_offset.numpy()
        places = list(zip(chunk.tolist(), slot.tolist(), offset.tolist(), strict=True))
        if len(set(places)) != len(places) or min(map(min, places)) < 0:
            self._log.note(
                f"{self.instance_id}: a step writes twice to one place or to none: {places}"
            )
            return
        # A step that fails may have written anything, but only where it had to write.
        chain = np.concatenate(
            [
                ~row.chain[row.first :] if row.name in self._log.faulted else row.chain[row.first :]
                for row in laid
            ]
        )
        group.write(paged.table.numpy(), chunk, slot, offset, group.stamps(chain))

    def _pass_states(self, stamps: StateStamps, batch: StateBatch, laid: Sequence[_Laid]) -> None:
        """Each row reads what stands for the tokens before it, and writes what it ends with."""
        written = stamps.slots(batch)
        if len(set(written)) != len(written):
            self._log.note(f"{self.instance_id}: two rows write one slot: {written}")
        for number, row in enumerate(laid):
            if bool(batch.fresh[number]) != (row.first == 0):
                self._log.note(f"{row.name}: begins at {row.first} with a wrong kind of state")
            is_faulted = row.name in self._log.faulted
            if row.first and not is_faulted:
                wrong = stamps.check(batch, number, int(row.chain[row.first - 1]))
                self._log.num_states += 1
                if wrong:
                    self._log.note(
                        f"{row.name} of {self.instance_id}: {wrong} words of its state at "
                        f"{row.first} are not its own"
                    )
        for number, row in enumerate(laid):
            chain = int(row.chain[-1])
            stamps.write(batch, number, chain ^ _MASK if row.name in self._log.faulted else chain)

    def _read(self, group: GroupStamps, paged: PagedBatch, laid: Sequence[_Laid]) -> None:
        by_start = {row.start: row for row in laid}
        seen: set[int] = set()
        for rows in paged.rows:
            starts = rows.token_index[:, 0].tolist()
            seen.update(starts)
            self._read_rows(group, paged.table.numpy(), rows, [by_start[i] for i in starts])
        if seen != by_start.keys():
            self._log.note(f"{self.instance_id}: rows {seen ^ by_start.keys()} do not attend")

    def _read_rows(self, group: GroupStamps, table: I64, rows: Rows, laid: Sequence[_Laid]) -> None:
        window, tokens = group.window, group.block_tokens
        first = rows.first.tolist()
        span = rows.chunk.shape[1] * tokens
        chain = np.zeros((len(laid), span), dtype=np.uint64)
        seen = np.zeros((len(laid), span), dtype=bool)
        for i, row in enumerate(laid):
            end = len(row.chain)
            low = max(0, row.first - window + 1) if window else 0
            if rows.context_len[i] != end or not first[i] <= low or end > first[i] + span:
                self._log.note(
                    f"{row.name}: table of {first[i]}..{first[i] + span}, context "
                    f"{int(rows.context_len[i])}, but it sees {low}..{end}"
                )
                continue
            chain[i, : end - first[i]] = row.chain[first[i] :]
            seen[i, low - first[i] : end - first[i]] = row.name not in self._log.faulted
        chunk, slot = rows.chunk.numpy(), rows.slot.numpy()
        if min(chunk.min(), slot.min(), table.min()) < 0 or chunk.max() >= table.shape[1]:
            self._log.note(f"{self.instance_id}: a table points nowhere")
            return
        self._log.num_positions += int(seen.sum()) * table.shape[0]
        wrong = group.wrong(table, chunk, slot, group.stamps(chain), seen)
        for layer, i, place in wrong[:1].tolist():
            self._log.note(
                f"{laid[i].name} of {self.instance_id}: {len(wrong)} positions read wrong, the "
                f"first {first[i] + place} of 0..{len(laid[i].chain) - 1} in layer "
                f"{group.layers[layer]}"
            )

    def _sample(self, batch: StepBatch, laid: Sequence[_Laid], broken: bool) -> SampleOutput:
        ends = {row.name: int(row.chain[-1]) for row in laid}
        names = [row.request.submit.request_id for row in batch.sampling_rows]
        others = [row.request.submit.request_id for row in batch.rows if not row.samples]
        flags = [broken and name in self._log.faulted for name in names]
        tokens = [self.oracle.next_token(ends[name]) for name in names]
        return SampleOutput(
            torch.tensor([0 if bad else t for t, bad in zip(tokens, flags, strict=True)]).long(),
            torch.tensor(flags).bool(),
            unsampled_broken=torch.tensor([broken and n in self._log.faulted for n in others]),
        )

    def _check_weights(self, whole: bool) -> None:
        """The bytes that the views show against the pack's: all, or a random region."""
        if self._tensors is None:
            return
        self._log.num_weight_checks += 1
        entries = list(self.index.tensors)
        for entry in entries if whole else [self._rng.choice(entries)]:
            size = entry.num_bytes
            low = 0 if whole else self._rng.randrange(size)
            high = size if whole else min(size, low + REGION_BYTES)
            begin = self.index.segments[entry.segment].offset + entry.offset
            view = self._tensors[entry.name].numpy().view(np.uint8).reshape(-1)[low:high]
            if not np.array_equal(view, self._blob[begin + low : begin + high]):
                self._log.note(f"weights {entry.name} of {self.instance_id} are not the pack's")
