"""The page pool against a plain list of owners and fences, under any order of calls."""

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import IntegrityError, OutOfPages
from engine.memory.page_pool import Owner, PagePool, PageRun

OWNERS = [Owner("a", "weights"), Owner("a", "kv"), Owner("b", "weights"), Owner("b", "kv")]
owners = st.sampled_from(OWNERS)


class PoolMachine(RuleBasedStateMachine):
    """`owner[page]` and `fence[page]` (a step) are the truth; both None: the page is free."""

    @initialize(num_pages=st.integers(1, 24))
    def make(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, 4096)
        self.owner: list[Owner | None] = [None] * num_pages
        self.fence: list[int | None] = [None] * num_pages
        self.step = 0
        self.retired = 0
        self.copies = False

    def is_free(self, page: int) -> bool:
        return self.owner[page] is None and self.fence[page] is None

    def free(self) -> list[int]:
        return [page for page in range(len(self.owner)) if self.is_free(page)]

    def lowest_run(self, length: int) -> PageRun | None:
        for first in range(len(self.owner) - length + 1):
            if all(self.is_free(page) for page in range(first, first + length)):
                return PageRun(first, length)
        return None

    def take(self, owner: Owner, pages: Iterable[int]) -> None:
        for page in pages:
            self.owner[page] = owner

    @rule(owner=owners, length=st.integers(1, 8))
    def alloc_run(self, owner: Owner, length: int) -> None:
        expected = self.lowest_run(length)
        if expected is None:
            with pytest.raises(OutOfPages):
                self.pool.alloc_run(owner, length)
            return
        assert self.pool.alloc_run(owner, length) == expected
        self.take(owner, expected.pages)

    @rule(owner=owners, first=st.integers(0, 23), length=st.integers(1, 6))
    def alloc_at(self, owner: Owner, first: int, length: int) -> None:
        run = PageRun(first, length)
        if first + length > len(self.owner):
            with pytest.raises(ValueError, match="not a run"):
                self.pool.alloc_at(owner, run)
        elif not all(self.is_free(page) for page in run.pages):
            with pytest.raises(OutOfPages):
                self.pool.alloc_at(owner, run)
        else:
            self.pool.alloc_at(owner, run)
            self.take(owner, run.pages)

    @rule(owner=owners, num_pages=st.integers(0, 10), above=st.just(0) | st.integers(0, 23))
    def alloc_pages(self, owner: Owner, num_pages: int, above: int) -> None:
        free = [page for page in self.free() if page >= above]
        if num_pages > len(free):
            with pytest.raises(OutOfPages):
                self.pool.alloc_pages(owner, num_pages, above)
            return
        expected = free[::-1][:num_pages]
        assert self.pool.alloc_pages(owner, num_pages, above) == expected
        self.take(owner, expected)

    @rule(owner=owners, data=st.data())
    def claim(self, owner: Owner, data: st.DataObject) -> None:
        nobodys = [page for page, holder in enumerate(self.owner) if holder is None]
        pages = data.draw(st.lists(st.sampled_from(nobodys), unique=True)) if nobodys else []
        self.pool.claim(owner, iter(pages))
        self.take(owner, pages)
        assert self.pool.is_ripe(pages) == all(self.fence[page] is None for page in pages)

    @rule(owner=owners, data=st.data())
    def claim_what_is_anothers(self, owner: Owner, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(0, len(self.owner) - 1), unique=True, min_size=1))
        if all(self.owner[page] is None for page in pages):
            with pytest.raises(IntegrityError, match="twice"):
                self.pool.claim(owner, [*pages, pages[0]])
        else:
            with pytest.raises(OutOfPages):
                self.pool.claim(owner, pages)

    @rule(owner=owners, data=st.data())
    def release(self, owner: Owner, data: st.DataObject) -> None:
        mine = [page for page, holder in enumerate(self.owner) if holder == owner]
        pages = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        self.pool.release(owner, iter(pages))
        for page in pages:
            self.owner[page] = None
            self.fence[page] = self.step + self.copies

    @rule(giver=owners, taker=owners, data=st.data())
    def hand_over(self, giver: Owner, taker: Owner, data: st.DataObject) -> None:
        mine = [page for page, holder in enumerate(self.owner) if holder == giver]
        pages = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        if any(self.fence[page] is not None for page in pages):
            with pytest.raises(IntegrityError, match="not ripe"):
                self.pool.hand_over(giver, taker, pages)
            return
        self.pool.hand_over(giver, taker, pages)
        self.take(taker, pages)

    @rule(owner=owners, data=st.data())
    def release_what_is_not_owned(self, owner: Owner, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, len(self.owner) - 1))
        pages = [page, page] if self.owner[page] == owner else [page]
        with pytest.raises(IntegrityError):
            self.pool.release(owner, pages)
        with pytest.raises(IntegrityError):
            self.pool.hand_over(owner, OWNERS[0], pages)

    @rule(ahead=st.integers(1, 3))
    def begin_step(self, ahead: int) -> None:
        self.step += ahead
        self.copies = False
        self.pool.begin_step(self.step)

    @rule()
    def begin_copies(self) -> None:
        self.copies = True
        self.pool.begin_copies()

    @precondition(lambda self: self.retired <= self.step)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.retired = data.draw(st.integers(self.retired, self.step))
        expected = {
            page
            for page, last in enumerate(self.fence)
            if last is not None and last <= self.retired
        }
        passed = self.pool.retire(self.retired)
        assert len(passed) == len(expected)
        assert set(passed) == expected
        for page in passed:
            self.fence[page] = None

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        cells = list(zip(self.owner, self.fence, strict=True))
        assert self.pool.num_free == len(self.free())
        assert self.pool.num_fenced == sum(o is None and f is not None for o, f in cells)
        assert self.pool.num_unripe == sum(o is not None and f is not None for o, f in cells)
        assert self.pool.has_fences == any(f is not None for _, f in cells)
        counts = {owner: self.owner.count(owner) for owner in OWNERS}
        assert self.pool.pages_by_owner() == {o: n for o, n in counts.items() if n}
        assert all(self.pool.owned(owner) == n for owner, n in counts.items())
        codes = []
        for page, (owner, fence) in enumerate(cells):
            assert self.pool.owner_of(page) == owner
            assert self.pool.is_ripe([page]) == (fence is None)
            if owner is None:
                codes.append(PagePool.FREE if fence is None else PagePool.FENCED)
            else:
                codes.append(PagePool.KV if owner.kind == "kv" else PagePool.WEIGHTS)
        assert list(self.pool.kinds()) == codes


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPagePool = PoolMachine.TestCase


@pytest.mark.parametrize(("num_pages", "page_bytes"), [(0, 4096), (4, 2048), (4, 12288)])
def test_impossible_pools(num_pages: int, page_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        PagePool(num_pages, page_bytes)


def test_a_run_has_pages() -> None:
    pool = PagePool(4, 4096)
    with pytest.raises(ValueError, match="at least one page"):
        pool.alloc_run(OWNERS[0], 0)
    assert pool.num_free == 4


def test_no_page_has_a_negative_number() -> None:
    pool = PagePool(4, 4096)
    with pytest.raises(ValueError, match="negative"):
        pool.claim(OWNERS[0], [1, -1])
    with pytest.raises(ValueError, match="not a run"):
        pool.alloc_at(OWNERS[0], PageRun(-1, 2))
    assert pool.num_free == 4


def test_bytes_round_up_to_pages() -> None:
    pool = PagePool(4, 4096)
    assert [pool.pages_needed(n) for n in (0, 1, 4096, 4097)] == [0, 1, 1, 2]


def test_a_claimed_page_is_nobody_elses_and_ripens_with_its_fence() -> None:
    pool = PagePool(4, 4096)
    loser, winner = Owner("loser", "kv"), Owner("winner", "weights")
    pages = pool.alloc_pages(loser, 4)
    pool.begin_step(1)
    pool.release(loser, pages)
    pool.claim(winner, [0, 1])
    assert not pool.is_ripe([0, 1])
    assert pool.retire(0) == []
    assert sorted(pool.retire(1)) == [0, 1, 2, 3]  # the claimed ones are told too
    assert pool.is_ripe([0, 1])
    assert pool.num_free == 2
    assert pool.alloc_pages(loser, 2) == [3, 2]


def test_a_claim_given_back_before_it_was_ripe_is_fenced_anew() -> None:
    pool = PagePool(2, 4096)
    owner = OWNERS[0]
    pool.release(owner, pool.alloc_pages(owner, 2))
    pool.claim(owner, [0, 1])
    pool.begin_step(3)
    pool.release(owner, [0, 1])
    assert pool.retire(2) == []
    assert len(pool.retire(3)) == 2


def test_what_is_released_behind_copies_waits_for_the_next_step() -> None:
    pool = PagePool(2, 4096)
    owner = OWNERS[0]
    pages = pool.alloc_pages(owner, 2)
    pool.begin_step(1)
    pool.begin_copies()
    pool.begin_copies()
    pool.release(owner, pages[:1])
    assert pool.retire(1) == []
    pool.begin_step(2)
    pool.release(owner, pages[1:])
    assert len(pool.retire(2)) == 2


def test_a_broken_book_is_noticed() -> None:
    pool = PagePool(4, 4096)
    (page,) = pool.alloc_pages(OWNERS[0], 1)
    pool._fenced[page] = 0
    with pytest.raises(IntegrityError, match="1 unripe; booked"):
        pool.check_integrity()
    pool = PagePool(4, 4096)
    pool._num_free = 3
    with pytest.raises(IntegrityError, match="counted"):
        pool.check_integrity()
    pool = PagePool(4, 4096)
    pool._kinds[2] = PagePool.KV
    with pytest.raises(IntegrityError, match="wrong list"):
        pool.check_integrity()


def test_a_nearly_full_pool_of_a_large_device_gives_what_is_left_and_no_more() -> None:
    pool = PagePool(70_000, 1 << 21)
    pool.alloc_pages(Owner("a", "kv"), 69_000)
    given = [pool.alloc_pages(Owner("b", "kv"), 1)[0] for _ in range(1000)]
    assert given == list(range(999, -1, -1))
    with pytest.raises(OutOfPages):
        pool.alloc_run(Owner("c", "weights"), 1)
    pool.check_integrity()
