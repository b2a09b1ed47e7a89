"""What happens to slots of states: versions, snapshots, points, and who finds what."""

from collections.abc import Sequence

import pytest
import torch

from engine.errors import IntegrityError, OutOfPages
from engine.memory.kv_cache import KvCache
from engine.memory.kv_memory import KvMemory
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.memory.policy.kv_value import ValueParams
from engine.memory.prefix_cache import RequestKv
from engine.memory.state_slots import MOST_SEEN, Move, Seen
from kernels.paged_attention import LayerGeometry

CPU = torch.device("cpu")
OWNER = Owner("m", "kv")
PAGE = 8192
BLOCK = 4
STATES = {
    (0, "conv"): ((16, 4), torch.float32),
    (0, "recurrent"): ((4, 16, 16), torch.float32),
    (2, "recurrent"): ((4, 16, 16), torch.float32),
}
FULL = {1: LayerGeometry(1, 32, 32)}
PROMPT = [*range(100, 130)]


class Device:
    """Keeps what was copied."""

    def __init__(self) -> None:
        self.moves: list[Move] = []

    def copy_within(self, moves: Sequence[Move]) -> None:
        self.moves += moves

    def last_done(self) -> int:
        return 1 << 30


class World:
    """One model over a pool."""

    def __init__(self, kv: bool = True, num_pages: int = 64, least: int = 4) -> None:
        self.pool = PagePool(num_pages, PAGE)
        self.device = Device()
        plan = plan_kv(FULL if kv else {}, torch.float32, BLOCK, PAGE, num_pages, STATES)
        params = ValueParams(snapshot_tokens=least)
        self.cache = KvCache(OWNER, plan, self.pool, CPU, params=params)
        self.memory = KvMemory(self.pool, self.device)
        self.memory.register("m", self.cache)
        self.live: list[RequestKv] = []

    def row(self, kv: RequestKv, first: int, end: int) -> None:
        """As the scheduler does."""
        self.cache.reserve(kv, end)
        self.cache.begin_row(kv, first, end, 1.0)
        self.check()

    def run(self, tokens: list[int], tenant: str = "t", repeats: bool = False) -> RequestKv:
        """A request whose prompt is computed, in rows as long as they may be."""
        kv = self.cache.new_kv(tenant, repeats)
        self.live.append(kv)
        first = self.cache.match(kv, tokens, 0.0)
        while first < len(tokens):
            end = first + self.cache.states.row_tokens(kv, first, len(tokens) - first)
            self.row(kv, first, end)
            self.cache.advance(kv, tokens, end, 1.0)
            first = end
        self.check()
        return kv

    def end(self, kv: RequestKv) -> None:
        self.cache.release(kv, 2.0)
        self.check()

    def check(self) -> None:
        self.cache.check_integrity(self.live)
        self.pool.check_integrity()


@pytest.mark.parametrize("kv", [True, False], ids=["hybrid", "states alone"])
def test_a_prompt_is_found_up_to_its_last_block(kv: bool) -> None:
    world = World(kv)
    first = world.run(PROMPT)
    assert world.memory.num_snapshots == 1
    assert world.cache.peek("t", [*PROMPT, 1, 2]) == 28
    assert world.cache.peek("t", PROMPT[:29]) == 28
    assert world.cache.peek("t", PROMPT[:28]) == 0, "the last token has to be computed"
    assert world.cache.peek("t", [*PROMPT[:24], 1, 2, 3, 4, 5]) == 0, "nobody kept that state"
    assert world.cache.peek("other", [*PROMPT, 1, 2]) == 0
    world.end(first)
    assert world.cache.peek("t", [*PROMPT, 1, 2]) == 28


def test_where_prompts_part_a_snapshot_is_taken_at_the_second() -> None:
    world = World()
    for number, hit in enumerate((0, 0, 16, 16)):
        prompt = PROMPT[:16] + [number] * 13
        kv = world.run(prompt)
        assert kv.num_cached == hit
        world.end(kv)
    # Three copies to a prompt's end and one to where they part, and two taken up.
    assert world.memory.num_snapshots == 5


def test_a_hit_is_copied_and_stays_for_others() -> None:
    world = World()
    world.end(world.run(PROMPT))
    kv = world.cache.new_kv("t")
    world.live.append(kv)
    world.device.moves.clear()
    assert world.cache.match(kv, PROMPT, 1.0) == 28
    world.check()
    found = list(kv.states.found)
    world.row(kv, 28, 30)
    assert not kv.states.found
    assert [slots[0] for slots in kv.states.slots] != found
    sizes = sorted(size for _, _, size in world.device.moves)
    assert sizes == [256, 4096, 4096], "each state once, and nothing for a snapshot that is there"
    assert world.cache.peek("t", PROMPT) == 28
    world.end(kv)


def test_short_beginnings_are_not_worth_a_snapshot() -> None:
    world = World(least=20)
    world.end(world.run(PROMPT[:19]))
    assert world.memory.num_snapshots == 0
    world.end(world.run(PROMPT))
    assert world.memory.num_snapshots == 1


def test_rows_end_at_points_and_at_blocks() -> None:
    world = World()
    kv = world.cache.new_kv("t")
    world.cache.match(kv, PROMPT, 0.0)
    states = world.cache.states
    assert kv.states.points == [7]
    assert states.row_tokens(kv, 0, 30) == 28
    assert states.row_tokens(kv, 12, 5) == 5
    assert states.row_tokens(kv, 28, 2) == 2
    assert states.whole_blocks(0, 13) == 12
    assert states.whole_blocks(6, 5) == 2, "up to position 8"
    assert states.whole_blocks(5, 2) == 2, "no block ends there"


def test_a_row_that_is_computed_twice_begins_with_the_version_before() -> None:
    world = World()
    kv = world.run(PROMPT[:10], repeats=True)
    assert [len(slots) for slots in kv.states.slots] == [2, 2]
    world.row(kv, 10, 11)
    read, write = kv.states.read, kv.states.write
    assert read != write
    world.row(kv, 10, 11)  # its token was lost
    assert (kv.states.read, kv.states.write) == (read, write)
    world.row(kv, 11, 12)
    assert (kv.states.read, kv.states.write) == (write, read)
    world.end(kv)


def test_who_is_preempted_at_a_blocks_end_leaves_its_slot() -> None:
    world = World()
    kv = world.cache.new_kv("t")
    world.live.append(kv)
    world.cache.match(kv, PROMPT, 0.0)
    world.row(kv, 0, 12)
    world.cache.advance(kv, PROMPT, 12, 1.0)
    world.device.moves.clear()
    world.end(kv)
    assert not world.device.moves, "nothing is copied for it"
    assert world.cache.match(kv, PROMPT, 2.0) == 12


def test_nothing_of_a_step_that_is_not_known_to_be_good_is_found() -> None:
    world = World()
    kv = world.cache.new_kv("t")
    world.live.append(kv)
    world.cache.match(kv, PROMPT, 0.0)
    world.row(kv, 0, 28)
    world.row(kv, 28, 30)  # launched behind it; takes the snapshot at 28
    assert list(kv.states.snapshots) == [7]
    world.row(kv, 0, 28)  # both were computed in vain
    assert not kv.states.snapshots
    world.row(kv, 28, 30)
    world.cache.drop_cached()
    world.cache.advance(kv, PROMPT, 30, 1.0)
    world.end(kv)
    assert world.cache.peek("t", [*PROMPT, 1]) == 0


def test_a_snapshot_takes_nobodys_pages() -> None:
    slots = World(kv=False).cache.pages_for(1)
    world = World(kv=False, num_pages=slots)
    kv = world.run(PROMPT)
    assert world.memory.num_snapshots == 0
    second = world.cache.new_kv("t")
    with pytest.raises(OutOfPages):
        world.cache.reserve(second, 4)
    assert not world.cache.fits(world.cache.demand(second, 4))
    world.end(kv)
    world.memory.reclaim()
    world.run(PROMPT)


def test_slots_move_with_their_pages() -> None:
    world = World()
    kv = world.run(PROMPT)
    group = world.cache.states.groups[1]
    before = group.chunks.block_offsets(kv.states.slots[1][0])
    pages = [page for page in range(64) if world.pool.owner_of(page) == OWNER]
    assert world.memory.clear(pages)
    world.check()
    after = group.chunks.block_offsets(kv.states.slots[1][0])
    assert before != after
    assert {(old // PAGE) * PAGE for old in before} <= {m[0] for m in world.device.moves}
    world.end(kv)


def test_what_a_sequence_takes() -> None:
    world = World()
    plan = world.cache.plan
    least = (16 * 4 + 2 * 4 * 16 * 16) * 4
    assert least <= plan.bytes_per_sequence(PAGE) <= least * 1.05
    alone = World(kv=False).cache.plan
    assert alone.bytes_per_token(PAGE) == 0
    assert alone.page_rates() == tuple((s.pages_per_block, 1.0) for s in alone.states)
    assert alone.pages_for(1) == alone.pages_for(10_000)
    assert not alone.keeps_nothing
    kv = world.run(PROMPT)
    held = world.cache.live_pages_of(kv)
    assert world.cache.live_pages_of_tenant("t") == pytest.approx(held)
    world.end(kv)
    assert world.cache.live_pages_of_tenant("t") == 0


def test_a_slot_held_twice_is_seen() -> None:
    world = World()
    kv = world.run(PROMPT, repeats=True)
    kv.states.slots[0][1] = kv.states.slots[0][0]
    with pytest.raises(IntegrityError, match="held twice"):
        world.check()


def test_names_seen_are_bounded_and_the_ends_of_prompts_go_first() -> None:
    seen = Seen()
    names = [number.to_bytes(4, "big") for number in range(MOST_SEEN + 10)]
    assert seen.add(names[:4]) == 0
    assert seen.add([*names[:3], b"x"]) == 3
    assert seen.add(names) == 4
    assert seen.add(names[:MOST_SEEN]) == MOST_SEEN
    assert len(seen._names) == MOST_SEEN


def test_a_head_larger_than_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="use larger pages"):
        plan_kv({}, torch.float32, BLOCK, PAGE, 8, {(0, "recurrent"): ((2, 64, 64), torch.float32)})
