"""The page pool against a plain list of owners and fences, under any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import IntegrityError, OutOfPages
from engine.page_pool import Owner, PagePool, PageRun

OWNERS = [Owner("a", "weights"), Owner("a", "kv"), Owner("b", "weights"), Owner("b", "kv")]
owners = st.sampled_from(OWNERS)


class PoolMachine(RuleBasedStateMachine):
    """`cells[page]` is "free", an Owner, or the step that fences the page."""

    @initialize(num_pages=st.integers(1, 24))
    def make(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, 4096)
        self.cells: list[str | int | Owner] = ["free"] * num_pages
        self.step = 0
        self.retired = 0

    def lowest_run(self, length: int) -> PageRun | None:
        for first in range(len(self.cells) - length + 1):
            if all(cell == "free" for cell in self.cells[first : first + length]):
                return PageRun(first, length)
        return None

    def take(self, owner: Owner, pages: range | list[int]) -> None:
        for page in pages:
            self.cells[page] = owner

    @rule(owner=owners, length=st.integers(1, 8))
    def alloc_run(self, owner: Owner, length: int) -> None:
        expected = self.lowest_run(length)
        if expected is None:
            with pytest.raises(OutOfPages):
                self.pool.alloc_run(owner, length)
            return
        assert self.pool.alloc_run(owner, length) == expected
        self.take(owner, expected.pages)

    @rule(owner=owners, lengths=st.lists(st.integers(1, 6), max_size=4))
    def alloc_runs(self, owner: Owner, lengths: list[int]) -> None:
        before = list(self.cells)
        expected: list[PageRun] = []
        for length in lengths:
            run = self.lowest_run(length)
            if run is None:
                self.cells = before
                with pytest.raises(OutOfPages):
                    self.pool.alloc_runs(owner, lengths)
                return
            expected.append(run)
            self.take(owner, run.pages)
        assert self.pool.alloc_runs(owner, lengths) == expected

    @rule(owner=owners, num_pages=st.integers(0, 10))
    def alloc_pages(self, owner: Owner, num_pages: int) -> None:
        free = [page for page, cell in enumerate(self.cells) if cell == "free"]
        if num_pages > len(free):
            with pytest.raises(OutOfPages):
                self.pool.alloc_pages(owner, num_pages)
            return
        expected = free[::-1][:num_pages]
        assert self.pool.alloc_pages(owner, num_pages) == expected
        self.take(owner, expected)

    @rule(owner=owners, data=st.data())
    def release(self, owner: Owner, data: st.DataObject) -> None:
        mine = [page for page, cell in enumerate(self.cells) if cell == owner]
        pages = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        self.pool.release(owner, iter(pages))
        for page in pages:
            self.cells[page] = self.step

    @rule(owner=owners, data=st.data())
    def release_what_is_not_owned(self, owner: Owner, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, len(self.cells) - 1))
        pages = [page, page] if self.cells[page] == owner else [page]
        with pytest.raises(IntegrityError):
            self.pool.release(owner, pages)

    @rule(ahead=st.integers(1, 3))
    def begin_step(self, ahead: int) -> None:
        self.step += ahead
        self.pool.begin_step(self.step)

    @precondition(lambda self: self.retired <= self.step)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.retired = data.draw(st.integers(self.retired, self.step))
        expected = {
            page
            for page, cell in enumerate(self.cells)
            if isinstance(cell, int) and cell <= self.retired
        }
        freed = self.pool.retire(self.retired)
        assert len(freed) == len(expected)
        assert set(freed) == expected
        for page in freed:
            self.cells[page] = "free"

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.cells.count("free")
        assert self.pool.num_fenced == sum(isinstance(cell, int) for cell in self.cells)
        counts = {owner: self.cells.count(owner) for owner in OWNERS}
        assert self.pool.pages_by_owner() == {o: n for o, n in counts.items() if n}
        assert all(self.pool.owned(owner) == n for owner, n in counts.items())
        holes = [n for n in range(1, len(self.cells) + 1) if self.lowest_run(n)]
        assert self.pool.largest_hole() == max(holes, default=0)


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
    with pytest.raises(ValueError, match="at least one page"):
        pool.alloc_runs(OWNERS[0], [2, 0])
    assert pool.num_free == 4


def test_bytes_round_up_to_pages() -> None:
    pool = PagePool(4, 4096)
    assert [pool.pages_needed(n) for n in (0, 1, 4096, 4097)] == [0, 1, 1, 2]


def test_a_broken_book_is_noticed() -> None:
    pool = PagePool(4, 4096)
    (page,) = pool.alloc_pages(OWNERS[0], 1)
    pool._fenced[page] = 0
    with pytest.raises(IntegrityError, match="fenced and owned"):
        pool.check_integrity()
    pool = PagePool(4, 4096)
    pool._num_free = 3
    with pytest.raises(IntegrityError, match="counted"):
        pool.check_integrity()


def test_a_nearly_full_pool_of_a_large_device_gives_what_is_left_and_no_more() -> None:
    pool = PagePool(70_000, 1 << 21)
    pool.alloc_pages(Owner("a", "kv"), 69_000)
    given = [pool.alloc_pages(Owner("b", "kv"), 1)[0] for _ in range(1000)]
    assert given == list(range(999, -1, -1))
    with pytest.raises(OutOfPages):
        pool.alloc_run(Owner("c", "weights"), 1)
    pool.check_integrity()
