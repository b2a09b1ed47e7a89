"""KV of one model: what its requests hold, what of it later requests may find, what is free.

Blocks come from the model's layer groups (`kv_group.py`), found by prefix hashes
(`prefix_cache.py`). What layers keep beside KV, the states of sequences, is in `state_slots.py`:
their slots are blocks too. The life of a request's KV:

    new_kv -> look -> match -> (reserve, begin_row, step, advance)* -> release
               |       |         |          |           |             `- full known blocks stay
               |       |         |          |           `- full blocks can be found, windows go
               |       |         |          `- states are where the row reads and writes them
               |       |         `- blocks for the positions to come; OutOfPages changes nothing
               |       `- references on the longest cached prefix
               `- what `match` would find and keep from being given back; as often as one likes

Only steps that are known to have gone well are passed to `advance`: nothing else is ever found by
another request. Found blocks are shared while their first request still runs; nobody writes a full
block again. Where two requests compute one prefix at once, the first to advance keeps the name.

Does not know scheduling: who waits or is preempted when this raises OutOfPages is decided above.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from engine.errors import IntegrityError, OutOfPages
from engine.memory.extent_plan import ExtentPlan
from engine.memory.kv_group import BlockGroup
from engine.memory.kv_plan import KvPlan
from engine.memory.page_pool import Owner, PagePool
from engine.memory.policy.kv_value import Reuse, ValueParams
from engine.memory.prefix_cache import (
    HOLE,
    BlockDemand,
    Hit,
    RequestKv,
    extend_hashes,
    full_hit,
    longest_hit,
    root_hash,
)
from engine.memory.state_slots import StateSlots

# A window group's blocks are freed when a step is known to have gone well, while the next one runs.
CHUNKS_IN_FLIGHT = 2
_NEVER = 1 << 62
_NO_HIT = Hit()


class KvCache:
    """All KV of one model."""

    def __init__(
        self,
        owner: Owner,
        plan: KvPlan,
        pool: PagePool,
        device: torch.device,
        caching: bool = True,
        max_chunk: int = 0,
        params: ValueParams | None = None,
    ) -> None:
        """`max_chunk`: tokens of one request in a step at most, bounds what windows need."""
        self.plan = plan
        self.owner = owner
        self.caching = caching
        self.params = params or ValueParams()
        self.groups = [BlockGroup(owner, group, pool, device, self.params) for group in plan.groups]
        self.states = StateSlots(
            owner, plan.states, pool, device, self.params, plan.block_tokens, self._count_slots
        )
        self.all_groups: tuple[BlockGroup[ExtentPlan], ...] = (*self.groups, *self.states.groups)
        self._pool = pool
        self._live: dict[RequestKv, None] = {}
        self._version = 0  # another one when requests have come to hold blocks, or hold no more
        self._no_room = (0,) * len(self.all_groups)
        self._blocks_of_tenant: dict[bytes, list[int]] = {}
        self._windows = [group.window for group in plan.groups]
        self._window_blocks = [self._most_blocks(window, max_chunk) for window in self._windows]
        self.reuse = Reuse()
        # Set by KvMemory: pages that extents of any model could give back, and how many free pages
        # are left alone while open extents hold cached blocks.
        self.evictable: Callable[[], int] = lambda: self.num_cached_pages
        self.spared_pages = 0

    # What a request does ----------------------------------------------------------------------

    def new_kv(self, tenant_id: str, repeats: bool = False) -> RequestKv:
        """An empty one. May be kept for the request's whole life, preemptions included.

        `repeats`: a token of it may be computed twice.
        """
        tables: list[list[int]] = [[] for _ in self.groups]
        states = self.states.new(repeats)
        return RequestKv(root_hash(tenant_id), tables, [0] * len(tables), states=states)

    def look(self, kv: RequestKv, token_ids: Sequence[int]) -> Hit:
        """What `match` would find. Changes nothing but the hashes, which are kept for the next.

        Nobody's blocks count as used because of it; whoever waits may look as often as it likes.
        """
        most = self._hash_prompt(kv.hashes, kv.salt, token_ids)
        names, indexes = kv.hashes[:most], [group.index for group in self.groups]
        num_full = full_hit(indexes, self._windows, names)
        missing = names[num_full] if num_full < most else None
        num_blocks = longest_hit(
            indexes, self._windows, names[:num_full], self.plan.block_tokens, self.states.indexes
        )
        if not num_blocks:
            return Hit(0, missing=missing, room=self._no_room, version=self._version)
        num_tokens = num_blocks * self.plan.block_tokens
        num_pages, room = 0, []
        snapshots = self.states.found(names[num_blocks - 1])
        found: list[list[int]] = [*self._found(kv, num_tokens), *snapshots]
        for group, blocks in zip(self.all_groups, found, strict=True):
            num_dead, num_open = group.pinned(blocks)
            num_pages += num_dead * group.plan.pages_per_extent
            room.append(num_open)
        return Hit(num_tokens, num_pages, tuple(room), missing, self._version)

    def may_hit_more(self, hit: Hit) -> bool:
        """Whether looking again may find more, or that it costs less, than it did. At once."""
        if hit.version != self._version:
            return True
        full = [g.index for g, w in zip(self.groups, self._windows, strict=True) if not w]
        missing = hit.missing
        return missing is not None and all(index.find(missing) is not None for index in full)

    def match(
        self, kv: RequestKv, token_ids: Sequence[int], now_s: float, hit: Hit | None = None
    ) -> int:
        """Refer to the longest cached prefix, at least one token short of all. Returns tokens.

        `hit`: what `look` has said just now, or less; None: look first.
        """
        if not kv.is_empty:
            raise IntegrityError(f"{self.owner.model_id}: match for a request that holds blocks")
        hit = self.look(kv, token_ids) if hit is None else hit
        num_blocks = hit.num_tokens // self.plan.block_tokens
        if self.caching and not kv.is_counted:
            kv.is_counted = True
            names = self._names(kv, token_ids)
            widest = self._windows.index(min(self._windows)) if self._windows else 0
            index = self.all_groups[widest].index
            self.reuse.add(len(names), index.num_known(names, num_blocks))
        if self.caching:
            self.states.match(kv, self._names(kv, token_ids), num_blocks, now_s)
        if num_blocks:
            self._live[kv] = None
            self._version += 1
        kv.num_cached = hit.num_tokens
        kv.num_registered = kv.num_blocks = num_blocks
        for g, blocks in enumerate(self._found(kv, hit.num_tokens)):
            self._count(kv.salt, g, self.groups[g].ref(blocks, now_s))
            kv.first[g] = num_blocks - len(blocks)
            kv.tables[g] = [HOLE] * kv.first[g] + blocks
        self._set_next_advance(kv, kv.num_cached)
        return kv.num_cached

    def peek(self, tenant_id: str, token_ids: Sequence[int]) -> int:
        """What `match` would return, without taking anything."""
        return self.look(self.new_kv(tenant_id), token_ids).num_tokens

    def reserve(self, kv: RequestKv, num_tokens: int) -> None:
        """Blocks for all positions < num_tokens. Raises OutOfPages, changing nothing."""
        missing = max(0, self._blocks(num_tokens) - kv.num_blocks)
        missing_slots = self.states.missing(kv.states)
        if not missing and not missing_slots:
            return
        wanted_blocks = self._by_group(missing, missing_slots)
        needed = [
            group.extents_needed(number)
            for group, number in zip(self.all_groups, wanted_blocks, strict=True)
        ]
        sizes = [group.plan.pages_per_extent for group in self.all_groups]
        least = [fewest * size for (fewest, _, _), size in zip(needed, sizes, strict=True)]
        left = self._pool.num_free - sum(least)
        if left < 0:
            raise OutOfPages(f"{missing} blocks of {self.owner.model_id} asked for")
        self._live[kv] = None
        kv.num_blocks += missing
        for g, group in enumerate(self.all_groups):
            fewest, before_dead, wanted = needed[g]
            spare = max(0, left - self.spared_pages) // sizes[g]
            extents = max(
                fewest + min(spare, wanted - fewest),
                fewest + min(left // sizes[g], before_dead - fewest),
            )
            left -= (extents - fewest) * sizes[g]
            pages = self._pool.alloc_pages(self.owner, extents * sizes[g]) if extents else []
            blocks = group.take(wanted_blocks[g], pages)
            self._count(kv.salt, g, len(blocks))
            if g < len(self.groups):
                kv.tables[g] += blocks
            else:
                kv.states.slots[g - len(self.groups)] += blocks

    def begin_row(self, kv: RequestKv, first: int, end: int, now_s: float) -> None:
        """A row of these positions is about to be laid out: all is reserved, and what a row before
        it computed has been launched. The states are where it reads them after this."""
        self.states.begin_row(kv, first, end, now_s)

    def advance(
        self, kv: RequestKv, token_ids: Sequence[int], num_computed: int, now_s: float
    ) -> None:
        """KV of the first `num_computed` tokens is known to be good, and `token_ids` what they are.

        Full blocks can be found from now on. Blocks that left a window are given back: a step in
        flight may still read them, a later one may write them.
        """
        if num_computed < kv.next_advance:
            return
        if num_computed > kv.num_blocks * self.plan.block_tokens:
            raise IntegrityError(f"{self.owner.model_id}: more is computed than was reserved")
        if self.caching:
            num_full = min(num_computed, len(token_ids)) // self.plan.block_tokens
            extend_hashes(kv.hashes, kv.salt, token_ids, self.plan.block_tokens, num_full)
            for g, group in enumerate(self.groups):
                table = kv.tables[g]
                for i in range(max(kv.num_registered, kv.first[g]), num_full):
                    group.index.add(kv.hashes[i], table[i])
            kv.num_registered = max(kv.num_registered, num_full)
        if self.states.groups and self.states.name(kv, self._num_good(kv, num_computed), now_s):
            self._version += 1
        for g, group in enumerate(self.groups):
            first = min(group.plan.first_needed(num_computed), kv.num_blocks)
            if first > kv.first[g]:
                table = kv.tables[g]
                left = [(i, table[i]) for i in range(first - 1, kv.first[g] - 1, -1)]
                table[kv.first[g] : first] = [HOLE] * len(left)
                kv.first[g] = first
                self._count(kv.salt, g, -group.unref(left, now_s))
        self._set_next_advance(kv, num_computed)

    def release(self, kv: RequestKv, now_s: float) -> None:
        """Give all references back; the hashes stay for the next `match`.

        Of the table of each group, by block number:

            blocks                         owner            what becomes of them
            [0, first)                     nobody: a HOLE   `advance` gave them back: window
            [first, cached)                shared, found    a reference less; they stay cached
            [cached, num_registered)       ours, named      the same: others may have found them
            [num_registered, num_blocks)   ours alone       free: not full, or not known as good

        where `cached` is num_cached in blocks. A named block whose name another request's block
        has, because both computed it, is free as well.
        """
        self._version += 1
        self.states.release(kv, min(self._num_named(kv), len(kv.hashes)), now_s)
        for g, group in enumerate(self.groups):
            table = kv.tables[g]
            # From its end: the beginning of a prefix is worth most and should be the last to go.
            held = [(i, table[i]) for i in range(len(table) - 1, kv.first[g] - 1, -1)]
            self._count(kv.salt, g, -group.unref(held, now_s))
        self._forget(kv)

    # What there is ----------------------------------------------------------------------------

    def demand(
        self, kv: RequestKv | None, num_tokens: int, hit: int = 0, num_versions: int = 1
    ) -> BlockDemand:
        """Blocks that positions < num_tokens still need beside those held.

        An empty `kv`, or None: beside a hit. `num_versions`: of the states, where kv is None.
        """
        if kv is None or kv.is_empty:
            kv, states = None, None if kv is None else kv.states
        else:
            states = kv.states
        have = hit // self.plan.block_tokens if kv is None else kv.num_blocks
        missing = max(0, self._blocks(num_tokens) - have)
        blocks = []
        for g, most in enumerate(self._window_blocks):
            if most is None:
                blocks.append(missing)
            else:
                first = self.groups[g].plan.first_needed(hit) if kv is None else kv.first[g]
                held = max(0, have - first)
                blocks.append(min(missing, max(0, most - held)))
        slots = self.states.missing(states, num_versions) if num_tokens else 0
        return BlockDemand((*blocks, *[slots] * len(self.states.groups)))

    def pages_of(self, demand: BlockDemand, hit: Hit = _NO_HIT) -> int:
        """Pages that the demand would take from the pool, all room in own open extents used.

        `hit`: as if it were referred to already.
        """
        return sum(
            group.plan.extents_for(max(0, blocks - group.num_open_room - room))
            * group.plan.pages_per_extent
            for group, blocks, room in zip(
                self.all_groups, demand.blocks, hit.room or self._no_room, strict=True
            )
        )

    def fits(self, demand: BlockDemand, spare_pages: int = 0, hit: Hit = _NO_HIT) -> bool:
        """Whether there is so much, with pages that other extents would have to give back."""
        needed = self.pages_of(demand, hit) + hit.num_pages + spare_pages
        return needed <= self._pool.num_free + self.evictable()

    def pages_for(self, num_tokens: int, repeats: bool = False) -> int:
        """Pages that an empty cache takes for one sequence of so many tokens. `repeats`: a token of
        it may be computed twice."""
        blocks = self.demand(None, num_tokens, num_versions=2 if repeats else 1).blocks
        return sum(
            group.plan.extents_for(number) * group.plan.pages_per_extent
            for group, number in zip(self.all_groups, blocks, strict=True)
        )

    def bytes_per_token(self) -> int:
        """Arena bytes a token costs while all groups hold it, rounding included."""
        return self.plan.bytes_per_token(self._pool.page_bytes)

    def live_pages_of(self, kv: RequestKv) -> float:
        """Pages that the request's blocks take, shared or not."""
        blocks = [len(table) - first for table, first in zip(kv.tables, kv.first, strict=True)]
        blocks += [len(kv.states.held(g)) for g in range(len(self.states.groups))]
        return sum(
            number * group.plan.pages_per_block
            for number, group in zip(blocks, self.all_groups, strict=True)
        )

    def live_pages_of_tenant(self, tenant_id: str) -> float:
        """Pages that a tenant's live blocks take, shared ones once (nobody else shares them)."""
        blocks = self._blocks_of_tenant.get(root_hash(tenant_id), [0] * len(self.all_groups))
        return sum(
            number * group.plan.pages_per_block
            for number, group in zip(blocks, self.all_groups, strict=True)
        )

    @property
    def num_live_pages(self) -> int:
        """Pages of extents with live blocks."""
        return self._pool.owned(self.owner) - self.num_cached_pages

    @property
    def num_cached_pages(self) -> int:
        """Pages of extents that hold cached blocks only: they can be given back."""
        return sum(group.num_dead * group.plan.pages_per_extent for group in self.all_groups)

    def live(self) -> list[RequestKv]:
        """Everything that holds blocks."""
        return list(self._live)

    # The whole --------------------------------------------------------------------------------

    def drop_cached(self) -> None:
        """Nothing computed so far can be found any more (it may be broken); requests go on."""
        self._version += 1
        for group in self.all_groups:
            group.forget_hashes()
        for kv in self._live:
            kv.num_registered = _NEVER
            kv.next_advance = 0
            kv.states.points = []

    def drop_all(self) -> None:
        """Give every page back (the model leaves). Whoever still held blocks holds none."""
        self._version += 1
        self.states.forget_prompts()
        for group in self.all_groups:
            group.drop_all()
        for kv in list(self._live):
            self._forget(kv)
        self._blocks_of_tenant.clear()

    def check_integrity(self, live: Sequence[RequestKv]) -> None:
        """Raises IntegrityError unless `live` hold exactly the references that are booked."""
        who = self.owner.model_id
        holders = {kv for kv in live if not kv.is_empty}
        if holders != {kv for kv in self._live if not kv.is_empty}:
            raise IntegrityError(f"{who}: KV is held by requests that are not known, or not held")
        for g, group in enumerate(self.all_groups):
            refs: dict[int, int] = {}
            for kv in holders:
                for block in self._held(kv, g):
                    refs[block] = refs.get(block, 0) + 1
            group.check_integrity(refs)
            booked = sum(blocks[g] for blocks in self._blocks_of_tenant.values())
            if booked != len(refs):
                raise IntegrityError(f"{who}: tenants hold {booked} blocks, requests {len(refs)}")
        held = sum(group.num_extents * group.plan.pages_per_extent for group in self.all_groups)
        if held != self._pool.owned(self.owner):
            raise IntegrityError(f"{self.owner}: holds {held} pages, pool says otherwise")

    def rewrite(self, group_number: int, moved: Mapping[int, int]) -> None:
        """Live blocks of a group (of `all_groups`) have got new ids. Looks at every block once, in
        numpy."""
        if not moved:
            return
        if group_number >= len(self.groups):
            for kv in self._live:
                self.states.rewrite(kv, group_number - len(self.groups), moved)
            return
        is_moved = np.zeros(max(moved) + 2, dtype=np.bool_)  # the last stands for all ids beyond
        is_moved[list(moved)] = True
        for kv in self._live:
            table, first = kv.tables[group_number], kv.first[group_number]
            blocks = kv.array(group_number)[first:]
            places = np.flatnonzero(is_moved[np.minimum(blocks, len(is_moved) - 1)])
            for i in (places + first).tolist():
                table[i] = moved[table[i]]
            if len(places):
                kv.rewritten()

    def _held(self, kv: RequestKv, g: int) -> list[int]:
        """Blocks of a group that a request refers to. Raises IntegrityError."""
        who = self.owner.model_id
        if g >= len(self.groups):
            held = kv.states.held(g - len(self.groups))
            if len(set(held)) != len(held):
                raise IntegrityError(f"{who}: a slot of states is held twice by one request")
            return held
        table, first = kv.tables[g], kv.first[g]
        if len(table) != kv.num_blocks or HOLE in table[first:]:
            raise IntegrityError(f"{who}: a table has a hole where a step may read")
        if any(block != HOLE for block in table[:first]):
            raise IntegrityError(f"{who}: a block behind the window is still held")
        return table[first:]

    def _by_group(self, blocks: int, slots: int) -> list[int]:
        return [blocks] * len(self.groups) + [slots] * len(self.states.groups)

    def _num_named(self, kv: RequestKv) -> int:
        """Leading blocks of it that may be found."""
        return kv.num_registered if self.caching and kv.num_registered != _NEVER else 0

    def _num_good(self, kv: RequestKv, num_computed: int) -> int:
        return min(num_computed, self._num_named(kv) * self.plan.block_tokens)

    def _names(self, kv: RequestKv, token_ids: Sequence[int]) -> list[bytes]:
        """Of the blocks that a hit may have: the last token is always computed, for somebody has
        to put out its logits."""
        most = max(0, len(token_ids) - 1) // self.plan.block_tokens
        extend_hashes(kv.hashes, kv.salt, token_ids, self.plan.block_tokens, most)
        return kv.hashes[:most]

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.plan.block_tokens)

    def _most_blocks(self, window: int, max_chunk: int) -> int | None:
        """Blocks that one request can hold in a group with this window; None: no bound."""
        if not window or not max_chunk:
            return None
        return self._blocks(window + CHUNKS_IN_FLIGHT * max_chunk) + 1

    def _hash_prompt(self, hashes: list[bytes], root: bytes, token_ids: Sequence[int]) -> int:
        """How many leading blocks may be a hit; their names are in `hashes` then."""
        if not self.caching:
            return 0
        most = max(0, (len(token_ids) - 1) // self.plan.block_tokens)
        if not (self.all_groups and self.all_groups[0].index):
            most = min(most, 1)  # enough to see that there is nothing, and when there is something
        extend_hashes(hashes, root, token_ids, self.plan.block_tokens, most)
        return most

    def _found(self, kv: RequestKv, num_tokens: int) -> list[list[int]]:
        """By group, the blocks of a hit of so many tokens that a query after it sees."""
        num_blocks, blocks = num_tokens // self.plan.block_tokens, []
        for group in self.groups:
            first = group.plan.first_needed(num_tokens) if num_blocks else 0
            found = [group.index.find(name) for name in kv.hashes[first:num_blocks]]
            blocks.append([block for block in found if block is not None])
        return blocks

    def _set_next_advance(self, kv: RequestKv, num_computed: int) -> None:
        size = self.plan.block_tokens
        following = (num_computed // size + 1) * size if self.caching else _NEVER
        for window, first in zip(self._windows, kv.first, strict=True):
            if window:
                following = min(following, (first + 1) * size + window - 1)
        kv.next_advance = following

    def _count(self, salt: bytes, group: int, change: int) -> None:
        """Live blocks of a tenant; one without any is forgotten."""
        if change:
            blocks = self._blocks_of_tenant.setdefault(salt, [0] * len(self.all_groups))
            blocks[group] += change
            if not any(blocks):
                del self._blocks_of_tenant[salt]

    def _count_slots(self, salt: bytes, state_group: int, change: int) -> None:
        self._count(salt, len(self.groups) + state_group, change)

    def _forget(self, kv: RequestKv) -> None:
        self.states.forget(kv)
        kv.num_blocks = 0
        kv.tables = [[] for _ in self.groups]
        kv.first = [0] * len(self.groups)
        kv.num_registered = kv.num_cached = kv.next_advance = 0
        kv.rewritten()
        self._live.pop(kv, None)
