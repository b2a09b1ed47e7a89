"""Who owns which page of the arena. Knows pages, not bytes: the same code serves every backend.

Weights ask for contiguous runs and get them low; KV asks for single pages and gets them high, so
that the two grow towards each other and a large model still finds a run. Whatever is given back is
fenced: it is handed out again only after the steps in flight at that moment have ended.

    alloc_run / alloc_pages  -> owned
    release                  -> fenced (owner gone, not yet usable)
    retire(step)             -> free

Does not know models, tensors or policies: who is evicted when this raises OutOfPages is the
caller's business.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.errors import IntegrityError, OutOfPages

OwnerKind = Literal["weights", "kv"]

_FREE = b"\x01"
_TAKEN = b"\x00"


@dataclass(frozen=True, slots=True)
class Owner:
    """A page's owner: one hosted model's weights or its KV."""

    model_id: str
    kind: OwnerKind


@dataclass(frozen=True, slots=True)
class PageRun:
    """`num_pages` neighbouring pages from `first` on."""

    first: int
    num_pages: int

    @property
    def pages(self) -> range:
        """The page numbers of the run."""
        return range(self.first, self.first + self.num_pages)


class PagePool:
    """Ownership of `num_pages` pages of `page_bytes` bytes (a power of two).

    Not thread-safe: only the worker's step thread allocates and releases.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        if num_pages < 1 or page_bytes < 4096 or page_bytes & (page_bytes - 1):
            raise ValueError("the pool needs pages, of a power of two of at least 4096 bytes")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._owner: list[Owner | None] = [None] * num_pages
        # One byte a page, 1 if it is free: searched at the speed of memchr, where a loop over the
        # owners took 9 ms for a page of a nearly full pool of 70,000.
        self._free_map = bytearray(_FREE * num_pages)
        self._fenced: dict[int, int] = {}  # page -> last step that may touch it
        self._step_in_flight = 0
        self._count: dict[Owner, int] = {}
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now (fenced ones cannot)."""
        return self._num_free

    @property
    def num_fenced(self) -> int:
        """Pages given back but perhaps still read by a step in flight."""
        return len(self._fenced)

    def pages_needed(self, num_bytes: int) -> int:
        """Pages that hold `num_bytes` bytes."""
        return -(-num_bytes // self.page_bytes)

    def pages_by_owner(self) -> dict[Owner, int]:
        """Owned pages per owner; owners without pages are absent."""
        return dict(self._count)

    def owned(self, owner: Owner) -> int:
        """Pages `owner` holds."""
        return self._count.get(owner, 0)

    def largest_hole(self) -> int:
        """Length of the longest run of free pages."""
        return max(len(hole) for hole in self._free_map.split(_TAKEN))

    def alloc_run(self, owner: Owner, num_pages: int) -> PageRun:
        """The lowest run of `num_pages` free neighbours. Raises OutOfPages, changing nothing."""
        if num_pages < 1:
            raise ValueError("a run has at least one page")
        first = self._free_map.find(_FREE * num_pages) if num_pages <= self._num_free else -1
        if first < 0:
            raise OutOfPages(f"no run of {num_pages} pages ({self._num_free} free)")
        run = PageRun(first, num_pages)
        self._take(owner, run.pages)
        return run

    def alloc_runs(self, owner: Owner, lengths: Sequence[int]) -> list[PageRun]:
        """One run for each length, all or nothing. Raises OutOfPages, changing nothing."""
        if min(lengths, default=1) < 1:
            raise ValueError("a run has at least one page")
        runs: list[PageRun] = []
        try:
            for length in lengths:
                runs.append(self.alloc_run(owner, length))
        except OutOfPages:
            for run in runs:
                self._drop(owner, run.pages)
            raise
        return runs

    def alloc_pages(self, owner: Owner, num_pages: int) -> list[int]:
        """The highest `num_pages` free pages, neighbours or not. Raises OutOfPages."""
        if num_pages > self._num_free:
            raise OutOfPages(f"{num_pages} pages asked for, {self._num_free} free")
        found: list[int] = []
        page = self.num_pages
        while len(found) < num_pages:
            page = self._free_map.rfind(_FREE, 0, page)
            found.append(page)
        self._take(owner, found)
        return found

    def release(self, owner: Owner, pages: Iterable[int]) -> None:
        """Give pages back. They stay fenced until `retire` passes the step now in flight."""
        pages = list(pages)
        self._check_owned(owner, pages)
        for page in pages:
            self._owner[page] = None
            self._fenced[page] = self._step_in_flight
        self._uncount(owner, len(pages))

    def begin_step(self, step: int) -> None:
        """Step `step` (rising) is about to be launched and may touch whatever is owned now."""
        self._step_in_flight = step

    def retire(self, step: int) -> list[int]:
        """Every step up to `step` has ended: its fenced pages are free. Returns those pages."""
        freed = [page for page, last in self._fenced.items() if last <= step]
        for page in freed:
            del self._fenced[page]
            self._free_map[page] = 1
        self._num_free += len(freed)
        return freed

    def check_integrity(self) -> None:
        """Raises IntegrityError unless owners, counts, fences and the free count agree."""
        count: dict[Owner, int] = {}
        num_free = 0
        for page, owner in enumerate(self._owner):
            if owner is not None:
                count[owner] = count.get(owner, 0) + 1
                if page in self._fenced:
                    raise IntegrityError(f"page {page} is fenced and owned by {owner}")
            elif page not in self._fenced:
                num_free += 1
            if self._free_map[page] != (owner is None and page not in self._fenced):
                raise IntegrityError(f"page {page} of {owner} is on the wrong list")
        if count != self._count or num_free != self._num_free:
            raise IntegrityError(
                f"counted {count}, {num_free} free; booked {self._count}, {self._num_free} free"
            )

    def _take(self, owner: Owner, pages: Iterable[int]) -> None:
        taken = 0
        for page in pages:
            self._owner[page] = owner
            self._free_map[page] = 0
            taken += 1
        if taken:
            self._count[owner] = self._count.get(owner, 0) + taken
        self._num_free -= taken

    def _drop(self, owner: Owner, pages: Iterable[int]) -> None:
        """Undo a `_take` of this very call: nothing can have touched the pages."""
        pages = list(pages)
        for page in pages:
            self._owner[page] = None
            self._free_map[page] = 1
        self._uncount(owner, len(pages))
        self._num_free += len(pages)

    def _uncount(self, owner: Owner, num_pages: int) -> None:
        left = self._count.get(owner, 0) - num_pages
        if left:
            self._count[owner] = left
        else:
            self._count.pop(owner, None)

    def _check_owned(self, owner: Owner, pages: Sequence[int]) -> None:
        if len(set(pages)) != len(pages):
            raise IntegrityError(f"{owner} releases a page twice: {pages}")
        for page in pages:
            if self._owner[page] != owner:
                raise IntegrityError(f"page {page} belongs to {self._owner[page]}, not {owner}")
