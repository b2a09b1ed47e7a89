"""States of one model's sequences: whose slot is whose, versions, and snapshots that others find.

A request holds a slot of each state group from its first `reserve` on. The states in it are those
after the last token that was computed, so that, unlike KV, they cannot be looked back into:

    two versions   A token of a constrained request may be computed twice (its mask was late). KV
                   does not mind, a state does. Such a request has two slots; a row reads the one
                   that ends where it begins, and writes the other.
    snapshots      A later request can begin with a prefix only where somebody kept the states at
                   exactly its end. A snapshot is a slot with the name of the block that ends there.
                   It is copied when the row behind that point begins, for the row before has
                   written it then and the next one has not, whatever is still in flight; it gets
                   its name when that row is known to have gone well.
    points         Where: at the last block's end of a prompt, for whoever continues the
                   conversation, and where a prompt leaves what others have begun with (`Seen`),
                   for whoever begins alike. Rows end there (`row_tokens`).
    handing over   A request that ends or is preempted at a block's end leaves its slot as a
                   snapshot. Rows of a long prompt end at blocks' ends, so that one that is
                   preempted begins again where it was.

A snapshot takes free pages, or overwrites what is cached already. It is nobody's reason to wait:
until it has its name, a step later at most, it is held as the request's own. Groups are evicted one
by one, and a snapshot is found only while all its slots are there.

Lives here: what happens to slots. Does not: KV and the hit (`kv_cache.py`), which pages hold slots
(`kv_group.py`), what is in them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from engine.errors import IntegrityError
from engine.memory.kv_group import BlockGroup
from engine.memory.kv_plan import StatePlan
from engine.memory.page_pool import Owner, PagePool
from engine.memory.policy.kv_value import ValueParams, snapshot_rank
from engine.memory.prefix_cache import HeldStates, PrefixIndex, RequestKv

Move: TypeAlias = tuple[int, int, int]
"""From and to in bytes of the arena, length."""
MOST_SEEN = 1 << 16
"""Names of blocks of prompts that are remembered: a million tokens."""


class Seen:
    """Names of blocks that prompts began with, the last MOST_SEEN of them."""

    def __init__(self) -> None:
        self._names: dict[bytes, None] = {}

    def add(self, names: Sequence[bytes]) -> int:
        """Of a prompt's blocks. Returns how many leading ones were there before."""
        known = next((i for i, name in enumerate(names) if name not in self._names), len(names))
        for name in reversed(names):  # whoever goes first then is the end of a prompt
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > MOST_SEEN:
            del self._names[next(iter(self._names))]
        return known


def _nobody() -> None:
    """Counts nothing."""


def _no_device(moves: Sequence[Move]) -> None:
    raise IntegrityError(f"nobody has said how {len(moves)} pieces of a state are copied")


class StateSlots:
    """The state groups of one KvCache. `count`: live blocks of a tenant have changed, as
    (salt, state group, by how many)."""

    def __init__(
        self,
        owner: Owner,
        plans: Sequence[StatePlan],
        pool: PagePool,
        device: torch.device,
        params: ValueParams,
        block_tokens: int,
        count: Callable[[bytes, int, int], None],
    ) -> None:
        self.groups = [
            BlockGroup(owner, plan, pool, device, params, snapshot_rank) for plan in plans
        ]
        self._owner = owner
        self._pool = pool
        self._size = block_tokens
        self._least = -(-params.snapshot_tokens // block_tokens)
        self._count = count
        self._seen = Seen()
        # Set by KvMemory: copies in the order of the steps, who counts snapshots, and free pages
        # that are left alone.
        self.copy: Callable[[Sequence[Move]], None] = _no_device
        self.note_snapshot: Callable[[], None] = _nobody
        self.spared_pages = 0

    @property
    def indexes(self) -> list[PrefixIndex]:
        """Snapshots by name, of each group."""
        return [group.index for group in self.groups]

    def new(self, repeats: bool) -> HeldStates:
        """`repeats`: a token of the request may be computed twice."""
        return HeldStates(2 if repeats else 1, slots=[[] for _ in self.groups])

    def found(self, name: bytes) -> list[list[int]]:
        """By group, the one slot that has this name, which is there."""
        slots = [index.find(name) for index in self.indexes]
        return [[slot] for slot in slots if slot is not None]

    def missing(self, held: HeldStates | None, num_versions: int = 1) -> int:
        """Slots of each group that a request still needs; None: one that holds nothing and needs
        so many."""
        if not self.groups:
            return 0
        return num_versions if held is None else held.num_versions - len(held.slots[0])

    def match(self, kv: RequestKv, names: Sequence[bytes], num_hit: int, now_s: float) -> None:
        """Refer to the snapshot behind `num_hit` blocks, and choose where to take others.

        `names`: of the blocks that a hit could have had at most.
        """
        if not self.groups:
            return
        held = kv.states
        held.branch = self._seen.add(names)
        wanted = {held.branch, len(names)}
        held.points = []
        last = num_hit
        for point in sorted(wanted):
            if point - last >= self._least:
                held.points.append(point)
                last = point
        held.num_good = num_hit * self._size
        if not num_hit:
            return
        for g, (slot,) in enumerate(self.found(names[num_hit - 1])):
            self._count(kv.salt, g, self.groups[g].ref([slot], now_s))
            held.found.append(slot)

    def row_tokens(self, kv: RequestKv, first: int, num_tokens: int) -> int:
        """Of the tokens from position `first` on, how many a row may compute: up to a point."""
        ends = (point * self._size for point in kv.states.points)
        return next((min(num_tokens, end - first) for end in ends if end > first), num_tokens)

    def whole_blocks(self, first: int, num_tokens: int) -> int:
        """So many tokens from `first` on or fewer, of a row that does not reach all it could: up
        to a block's end, if there is one."""
        if not self.groups:
            return num_tokens
        end = (first + num_tokens) // self._size * self._size
        return end - first if end > first else num_tokens

    def begin_row(self, kv: RequestKv, first: int, end: int, now_s: float) -> None:
        """A row of the positions from `first` to `end` is about to be laid out; its slots are
        reserved. Copies what it begins with, and the snapshot that is due."""
        if not self.groups:
            return
        held = kv.states
        for blocks in [b for b in held.snapshots if b * self._size > first]:
            self._drop(kv, blocks)  # its row was computed in vain
        if held.found:
            self._take_over(kv, now_s)
        if held.num_versions == 1:
            held.ends = [end]
        else:
            held.ends = held.ends or [first] + [-1] * (held.num_versions - 1)
            held.read = 0 if not first else held.ends.index(first)
            held.write = 1 - held.read
            held.ends[held.read], held.ends[held.write] = first, end
        blocks, rest = divmod(first, self._size)
        if not rest and blocks in held.points:
            held.points = [point for point in held.points if point > blocks]
            self._take_snapshot(kv, blocks)

    def name(self, kv: RequestKv, num_good: int, now_s: float) -> bool:
        """So many tokens are known to be computed well. Whether a snapshot has got its name."""
        kv.states.num_good = num_good
        known = [b for b in kv.states.snapshots if b * self._size <= num_good]
        for blocks in known:
            self._drop(kv, blocks, kv.hashes[blocks - 1], now_s)
        return bool(known)

    def release(self, kv: RequestKv, last_named: int, now_s: float) -> None:
        """Give all slots back. Those at the end of a block up to `last_named` stay as snapshots."""
        if not self.groups:
            return
        held = kv.states
        for blocks in list(held.snapshots):
            good = blocks * self._size <= held.num_good and blocks <= last_named
            self._drop(kv, blocks, kv.hashes[blocks - 1] if good else None, now_s)
        for g, group in enumerate(self.groups):
            left = list(held.slots[g])
            for version, end in enumerate(held.ends):
                blocks, rest = divmod(end, self._size)
                if rest or not 0 < end <= held.num_good or blocks > last_named or not left:
                    continue
                slot = left[version]
                if group.index.add(kv.hashes[blocks - 1], slot) and not g:
                    self.note_snapshot()
                self._count(kv.salt, g, -group.unref([(blocks - 1, slot)], now_s))
                left.remove(slot)
                break
            depth = held.num_good // self._size - 1
            returned = [(0, slot) for slot in left]
            returned += [(depth, slot) for slot in held.found[g : g + 1]]
            self._count(kv.salt, g, -group.unref(returned, now_s))
        self.forget(kv)

    def forget(self, kv: RequestKv) -> None:
        """It holds nothing any more."""
        held = kv.states
        kv.states = HeldStates(held.num_versions, slots=[[] for _ in self.groups])

    def forget_prompts(self) -> None:
        """The model leaves: what prompts began with is not remembered for it."""
        self._seen = Seen()

    def rewrite(self, kv: RequestKv, group: int, moved: Mapping[int, int]) -> None:
        """Slots have got new ids."""
        held = kv.states
        held.slots[group] = [moved.get(slot, slot) for slot in held.slots[group]]
        if held.found:
            held.found[group] = moved.get(held.found[group], held.found[group])
        for slots in held.snapshots.values():
            slots[group] = moved.get(slots[group], slots[group])

    def _take_over(self, kv: RequestKv, now_s: float) -> None:
        """What was found goes into the request's own slot, which the first row reads."""
        held = kv.states
        self.copy(self._moves(held.found, [slots[0] for slots in held.slots]))
        for g, group in enumerate(self.groups):
            depth = held.num_good // self._size - 1
            self._count(kv.salt, g, -group.unref([(depth, held.found[g])], now_s))
        held.found = []

    def _take_snapshot(self, kv: RequestKv, blocks: int) -> None:
        held = kv.states
        name = kv.hashes[blocks - 1]
        if all(group.index.find(name) is not None for group in self.groups):
            return
        if not all(self._has_slot(group) for group in self.groups):
            return
        taken = []
        for g, group in enumerate(self.groups):
            size = group.plan.pages_per_extent
            fresh = not group.num_open_free and self._may_grow(size)
            pages = self._pool.alloc_pages(self._owner, size) if fresh else []
            taken += group.take(1, pages)
            self._count(kv.salt, g, 1)
        self.copy(self._moves([slots[held.read] for slots in held.slots], taken))
        held.snapshots[blocks] = taken
        kv.next_advance = 0

    def _has_slot(self, group: BlockGroup[StatePlan]) -> bool:
        if group.num_open_free or group.num_cached:
            return True
        return self._may_grow(sum(g.plan.pages_per_extent for g in self.groups))

    def _may_grow(self, num_pages: int) -> bool:
        """Below the watermark no further: the next step fills it up, least valuable first."""
        return self._pool.num_free - num_pages >= self.spared_pages // 2

    def _drop(
        self, kv: RequestKv, blocks: int, name: bytes | None = None, now_s: float = 0.0
    ) -> None:
        """A snapshot is no longer the request's: cached under its name, or free."""
        for g, (group, slot) in enumerate(
            zip(self.groups, kv.states.snapshots.pop(blocks), strict=True)
        ):
            if name is not None and group.index.add(name, slot):
                if blocks == kv.states.branch:
                    group.note_hit(slot)  # two prompts have begun so already
                if not g:
                    self.note_snapshot()
            self._count(kv.salt, g, -group.unref([(blocks - 1, slot)], now_s))

    def _moves(self, sources: Sequence[int], targets: Sequence[int]) -> list[Move]:
        return [
            (source, target, group.plan.block_bytes)
            for group, old, new in zip(self.groups, sources, targets, strict=True)
            for source, target in zip(
                group.chunks.block_offsets(old), group.chunks.block_offsets(new), strict=True
            )
        ]
