"""What a model keeps of its sequences in a given pool: KV in layer groups, states in state groups.

A layer group is the layers of one KV geometry. Its blocks hold `block_tokens` positions each.

A state group is the states of one shape and dtype (`kernels/state_rows.py`): what recurrent and
convolutional layers keep. A block of it holds those of one sequence, however long that is; it is
called a slot. States larger than a page are cut by their first axis (heads, channels) into pieces.
Everything else is as for KV: extents, moves, prices, and slots that can be found by the name of a
prefix (snapshots).

Lives here: the choice of the extent. Does not: which block belongs to whom (`kv_group.py`), nor
addresses (`extent_plan.py`).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

import torch

from engine.memory.extent_plan import Cut, ExtentPlan, all_cuts
from engine.memory.page_pool import PagePool
from engine.pack import KvGroup, PackIndex, StateGroup, StateKey
from kernels.paged_attention import BlockGeometry, LayerGeometry, largest_unit_bytes
from kernels.state_rows import StateGeometry

# What an extent costs beside its share of pages that no block fills: half of one for each sequence
# of about so many tokens, and some half-used ones in a pool of so many pages.
SEQUENCE_TOKENS = 1024
HALF_USED_EXTENTS = 4
# Many blocks of one layer together are what GPUs want (one block after the other of all layers
# costs attention 31-56 %): extents are not made smaller than this, and of those that cost about
# the same the one with the longest chunks is taken.
LEAST_EXTENT_TOKENS = 64
OVERHEAD_SLACK = 0.01


NO_SOURCES: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan(ExtentPlan):
    """Layers of one KV geometry. `block` is the same for all of them."""

    layers: tuple[int, ...]
    block: BlockGeometry

    @property
    def window(self) -> int:
        """Positions a query sees at most, itself included; 0: all. Those of a chunk, too."""
        return self.block.layer.reach

    @property
    def tokens_per_extent(self) -> int:
        """Positions one extent holds."""
        return self.blocks_per_extent * self.block.block_tokens

    def first_needed(self, num_computed: int) -> int:
        """The first block that a query at position `num_computed` or later may still see."""
        return self.block.layer.first_seen(num_computed) // self.block.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan(ExtentPlan):
    """States of one geometry. `states`: of which layers, in the order of the table's rows, each
    with as many rows as it has pieces."""

    states: tuple[StateKey, ...]
    geometry: StateGeometry

    def table_rows(self, place: int) -> slice:
        """The table's rows of one state; `place`: in `states`."""
        return slice(place * self.geometry.num_pieces, (place + 1) * self.geometry.num_pieces)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """What a model keeps of its sequences.

    layer_group   by layer that attends, (its group, its place in the group); a layer that reads
                  another's KV has that one's place
    states        its state groups
    state_place   by state, (its group, its place in the group)
    """

    groups: tuple[GroupPlan, ...]
    layer_group: Mapping[int, tuple[int, int]]
    block_tokens: int
    states: tuple[StatePlan, ...] = ()
    state_place: Mapping[StateKey, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, index: PackIndex, block_tokens: int, pool: PagePool) -> "KvPlan":
        """A pack's in this pool; the many models of one shape share it. Raises ValueError as
        `plan_kv` does."""
        kept = (index.kv_groups, index.kv_dtype, block_tokens, pool.page_bytes, pool.num_pages)
        return plan_pack(*kept, index.states)

    @property
    def keeps_nothing(self) -> bool:
        """Whether it is an encoder's, which keeps nothing of an input."""
        return not self.groups and not self.states

    def bytes_per_sequence(self, page_bytes: int) -> int:
        """Arena bytes of a sequence's states, however long it is, rounding included."""
        return sum(math.ceil(state.pages_per_block * page_bytes) for state in self.states)

    def writes(self, layer: int) -> bool:
        """Whether the layer has KV of its own, and does not read that of another."""
        group, place = self.layer_group[layer]
        return self.groups[group].layers[place] == layer

    def bytes_per_token(self, page_bytes: int) -> int:
        """Arena bytes a cached token costs while all groups hold it, rounding included."""
        return sum(
            -(-group.pages_per_extent * page_bytes // group.tokens_per_extent)
            for group in self.groups
        )

    def page_rates(self) -> tuple[tuple[float, float], ...]:
        """By group: pages a position takes, and the most positions that it keeps.

        A state is as a group that keeps one position.
        """
        kv = tuple(
            (
                group.pages_per_extent / group.tokens_per_extent,
                float(group.window + self.block_tokens) if group.window else math.inf,
            )
            for group in self.groups
        )
        return kv + tuple((state.pages_per_block, 1.0) for state in self.states)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that an empty cache takes for the first `num_tokens` positions of a sequence."""
        num_blocks = -(-num_tokens // self.block_tokens)
        kv = sum(group.extents_for(num_blocks) * group.pages_per_extent for group in self.groups)
        return kv + sum(state.extents_for(1) * state.pages_per_extent for state in self.states)


def plan_kv(
    layers: Mapping[int, LayerGeometry] | Sequence[LayerGeometry],
    dtype: torch.dtype,
    block_tokens: int,
    page_bytes: int,
    num_pages: int,
    states: Mapping[StateKey, tuple[tuple[int, ...], torch.dtype]] | None = None,
    sources: Mapping[int, int] = NO_SOURCES,
) -> KvPlan:
    """Group layers, and states (their shape and dtype), by geometry; choose each group's extent.

    `sources`: layers without KV of their own -> those whose KV they read. Raises ValueError where
    one block of one layer is larger than a page.
    """
    numbered = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
    members: dict[LayerGeometry, list[int]] = {}
    for number, layer in numbered.items():
        if number not in sources:
            members.setdefault(layer, []).append(number)
    groups = tuple(
        _plan_group(geometry, tuple(numbers), dtype, block_tokens, page_bytes, num_pages)
        for geometry, numbers in members.items()
    )
    places = {
        layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)
    }
    kinds: dict[tuple[tuple[int, ...], torch.dtype], list[StateKey]] = {}
    for key, kind in (states or {}).items():
        kinds.setdefault(kind, []).append(key)
    state_plans = tuple(
        _plan_states(shape, kept, tuple(keys), page_bytes, num_pages)
        for (shape, kept), keys in kinds.items()
    )
    return KvPlan(
        groups,
        {layer: places[sources.get(layer, layer)] for layer in numbered},
        block_tokens,
        state_plans,
        {key: (s, i) for s, plan in enumerate(state_plans) for i, key in enumerate(plan.states)},
    )


@functools.lru_cache(maxsize=256)
def plan_pack(
    kv_groups: tuple[KvGroup, ...],
    kv_dtype: str,
    block_tokens: int,
    page_bytes: int,
    num_pages: int,
    states: tuple[StateGroup, ...] = (),
) -> KvPlan:
    """`plan_kv` for a pack; the many models of one shape share it. Raises ValueError alike."""
    layers = {
        layer: LayerGeometry(
            group.num_kv_heads, group.k_dim, group.v_dim, group.window, group.v_in_k, group.chunk
        )
        for group in kv_groups
        for layer in (*group.layers, *(reader for reader, _ in group.readers))
    }
    kept = {
        key: (group.shape, getattr(torch, group.dtype)) for group in states for key in group.states
    }
    geometries = {number: layers[number] for number in sorted(layers)}
    sources = dict(pair for group in kv_groups for pair in group.readers)
    dtype = getattr(torch, kv_dtype)
    return plan_kv(geometries, dtype, block_tokens, page_bytes, num_pages, kept, sources)


def _plan_group(
    geometry: LayerGeometry,
    layers: tuple[int, ...],
    dtype: torch.dtype,
    block_tokens: int,
    page_bytes: int,
    num_pages: int,
) -> GroupPlan:
    unit = largest_unit_bytes(geometry, dtype, page_bytes)
    block = BlockGeometry(geometry, block_tokens, dtype, unit)
    block_bytes = block.block_units * unit
    if block_bytes > page_bytes:
        raise ValueError(
            f"a block of {block_tokens} positions needs {block_bytes} bytes, more than a page of "
            f"{page_bytes}: use larger pages or smaller blocks"
        )

    def overhead(cut: Cut) -> float:
        """Of pages without blocks, and half an extent a sequence."""
        half = cut.blocks_per_extent * block_tokens / 2
        return (
            _waste(cut, len(layers) * block_bytes, page_bytes, num_pages) + half / SEQUENCE_TOKENS
        )

    cuts = list(all_cuts(len(layers), page_bytes // block_bytes))
    most = max(cut.blocks_per_extent for cut in cuts) * block_tokens
    least = min(LEAST_EXTENT_TOKENS, most)
    cuts = [cut for cut in cuts if cut.blocks_per_extent * block_tokens >= least]
    best = min(map(overhead, cuts))
    return GroupPlan(
        # The longest chunks among those that cost about the least.
        **asdict(
            max(
                (cut for cut in cuts if overhead(cut) <= best + OVERHEAD_SLACK),
                key=lambda cut: (cut.blocks_per_chunk, -overhead(cut)),
            )
        ),
        num_layers=len(layers),
        unit_bytes=unit,
        block_units=block.block_units,
        layers=layers,
        block=block,
    )


def _plan_states(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    states: tuple[StateKey, ...],
    page_bytes: int,
    num_pages: int,
) -> StatePlan:
    num_bytes = math.prod(shape) * dtype.itemsize
    pieces = next((n for n in _divisors(shape[0]) if num_bytes // n <= page_bytes), None)
    if pieces is None:
        raise ValueError(
            f"a state of {shape[0]} heads or channels, {num_bytes} bytes together, has some that "
            f"are larger than a page of {page_bytes}: use larger pages"
        )
    piece_bytes = num_bytes // pieces
    unit = math.gcd(piece_bytes, page_bytes)
    rows = len(states) * pieces
    cuts = list(all_cuts(rows, page_bytes // piece_bytes))
    return StatePlan(
        # A sequence has one slot: of extents that leave no page half empty the smallest is best.
        **asdict(min(cuts, key=lambda cut: _waste(cut, rows * piece_bytes, page_bytes, num_pages))),
        num_layers=rows,
        unit_bytes=unit,
        block_units=piece_bytes // unit,
        states=states,
        geometry=StateGeometry(shape, dtype, pieces, unit),
    )


def _waste(cut: Cut, block_bytes: int, page_bytes: int, num_pages: int) -> float:
    """What no block fills, of what blocks do; `block_bytes`: of all layers."""
    used = cut.blocks_per_extent * block_bytes
    return (
        cut.pages_per_extent * page_bytes / used
        - 1
        + HALF_USED_EXTENTS * cut.pages_per_extent / num_pages
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
