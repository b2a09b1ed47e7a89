"""Who owns which page of the arena. Knows pages, not bytes: the same code serves every backend.

Weights ask for contiguous runs and get them low; KV asks for single pages and gets them high, so
that the two grow towards each other and a large model still finds a run. Whatever is given back is
fenced: it is handed out again only after the steps in flight at that moment have ended.

    alloc_run / alloc_at / alloc_pages   free           -> owned
    release                              owned          -> fenced (owner gone, not yet usable)
    retire(step)                         fenced         -> free
    claim                                free or fenced -> owned, but not ripe while it is fenced
    hand_over                            owned          -> owned by another, in device order

A claimed page belongs to its owner at once, so that nobody else gets it on its way back; it may be
written only when it is ripe. Whoever loads a model claims all its pages first and waits then.

Does not know models, tensors or policies: who is evicted when this raises OutOfPages is the
caller's business.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.errors import IntegrityError, OutOfPages

OwnerKind = Literal["weights", "kv"]

_FREE, _FENCED, _KV, _WEIGHTS = range(4)
_FREE_CODE = bytes([_FREE])
_KIND: dict[OwnerKind, int] = {"kv": _KV, "weights": _WEIGHTS}


@dataclass(frozen=True, slots=True)
class Owner:
    """A page's owner: the weights or the KV of one model (a resident pack)."""

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

    Not thread-safe: only the worker's step thread allocates and releases. The four codes are those
    of `kinds()`; a claimed page has its owner's, ripe or not.
    """

    FREE: ClassVar[int] = _FREE
    FENCED: ClassVar[int] = _FENCED
    KV: ClassVar[int] = _KV
    WEIGHTS: ClassVar[int] = _WEIGHTS

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        if num_pages < 1 or page_bytes < 4096 or page_bytes & (page_bytes - 1):
            raise ValueError("the pool needs pages, of a power of two of at least 4096 bytes")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._owner: list[Owner | None] = [None] * num_pages
        # One byte a page: searched at the speed of memchr, where a loop over the owners took 9 ms
        # for a page of a nearly full pool of 70,000.
        self._kinds = bytearray(_FREE_CODE * num_pages)
        # Page -> last step that may touch it, in the order of these steps.
        self._fenced: dict[int, int] = {}
        self._num_unripe = 0
        self._last_step = 0
        self._fence_step = 0  # the last step that may touch what is released now
        self._count: dict[Owner, int] = {}
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be written as soon as they are handed out."""
        return self._num_free

    @property
    def num_fenced(self) -> int:
        """Pages given back, owned by nobody, but perhaps still read by a step in flight."""
        return len(self._fenced) - self._num_unripe

    @property
    def num_unripe(self) -> int:
        """Pages claimed by a new owner that wait for their fence."""
        return self._num_unripe

    @property
    def has_fences(self) -> bool:
        """Whether anybody's page waits for a step to end: an idle engine must pass empty ones."""
        return bool(self._fenced)

    def pages_needed(self, num_bytes: int) -> int:
        """Pages that hold `num_bytes` bytes."""
        return -(-num_bytes // self.page_bytes)

    def pages_by_owner(self) -> dict[Owner, int]:
        """Owned pages per owner; owners without pages are absent."""
        return dict(self._count)

    def owned(self, owner: Owner) -> int:
        """Pages `owner` holds."""
        return self._count.get(owner, 0)

    def owner_of(self, page: int) -> Owner | None:
        """Who holds the page, ripe or not; None while it is free or fenced."""
        return self._owner[page]

    def is_ripe(self, pages: Iterable[int]) -> bool:
        """Whether no fence is left on any of these pages: their owner may write them."""
        return not self._fenced or self._fenced.keys().isdisjoint(pages)

    def kinds(self) -> bytes:
        """FREE, FENCED, KV or WEIGHTS for each page, as of now."""
        return bytes(self._kinds)

    def alloc_run(self, owner: Owner, num_pages: int) -> PageRun:
        """The lowest run of `num_pages` free neighbours. Raises OutOfPages, changing nothing."""
        if num_pages < 1:
            raise ValueError("a run has at least one page")
        first = self._kinds.find(_FREE_CODE * num_pages) if num_pages <= self._num_free else -1
        if first < 0:
            raise OutOfPages(f"no run of {num_pages} pages ({self._num_free} free)")
        run = PageRun(first, num_pages)
        self._take(owner, run.pages)
        return run

    def alloc_at(self, owner: Owner, run: PageRun) -> None:
        """Exactly these pages, which must be free now. Raises OutOfPages, changing nothing."""
        end = run.first + run.num_pages
        if run.num_pages < 1 or run.first < 0 or end > self.num_pages:
            raise ValueError(f"{run} is not a run of this pool")
        if self._kinds.count(_FREE_CODE, run.first, end) != run.num_pages:
            raise OutOfPages(f"{run} is not free")
        self._take(owner, run.pages)

    def alloc_pages(self, owner: Owner, num_pages: int, above: int = 0) -> list[int]:
        """The highest `num_pages` free pages, neighbours or not, none of them below `above`.

        Raises OutOfPages, changing nothing.
        """
        found: list[int] = []
        page = self.num_pages
        while len(found) < num_pages <= self._num_free:
            page = self._kinds.rfind(_FREE_CODE, above, page)
            if page < 0:
                break
            found.append(page)
        if len(found) < num_pages:
            raise OutOfPages(
                f"{num_pages} pages from page {above} on asked for, {self._num_free} free"
            )
        self._take(owner, found)
        return found

    def claim(self, owner: Owner, pages: Iterable[int]) -> None:
        """Take pages that are free or fenced; `is_ripe` says when they may be written.

        Raises OutOfPages, changing nothing, where one of them has an owner.
        """
        pages = list(pages)
        if len(set(pages)) != len(pages):
            raise IntegrityError(f"{owner} claims a page twice: {pages}")
        if min(pages, default=0) < 0:
            raise ValueError(f"no page has a negative number: {pages}")
        for page in pages:
            if self._owner[page] is not None:
                raise OutOfPages(f"page {page} belongs to {self._owner[page]}")
        if self._fenced:
            unripe = sum(page in self._fenced for page in pages)
            self._num_unripe += unripe
            self._num_free += unripe  # `_take` counts them all as having been free
        self._take(owner, pages)

    def hand_over(self, giver: Owner, taker: Owner, pages: Iterable[int]) -> None:
        """Ripe pages change their owner without a fence.

        Only for memory that both touch by nothing but work in device order (steps, copies): what
        the taker launches runs behind what the giver has launched.
        """
        pages = list(pages)
        self._check_owned(giver, pages)
        if not self.is_ripe(pages):
            raise IntegrityError(f"{giver} hands over pages that are not ripe: {pages}")
        self._uncount(giver, len(pages))
        self._num_free += len(pages)  # `_take` counts them as having been free
        self._take(taker, pages)

    def release(self, owner: Owner, pages: Iterable[int]) -> None:
        """Give pages back. They stay fenced until `retire` passes the step now in flight."""
        pages = list(pages)
        self._check_owned(owner, pages)
        for page in pages:
            self._owner[page] = None
            self._kinds[page] = _FENCED
            if self._fenced.pop(page, None) is not None:
                self._num_unripe -= 1
            self._fenced[page] = self._fence_step
        self._uncount(owner, len(pages))

    def begin_step(self, step: int) -> None:
        """Step `step` (rising) is about to be launched and may touch whatever is owned now."""
        self._last_step = self._fence_step = step

    def begin_copies(self) -> None:
        """Copies inside the arena are about to be handed to the device, behind the last step.

        That step may end before they do, so what is released from now on waits for the next one,
        which runs behind them.
        """
        self._fence_step = self._last_step + 1

    def retire(self, step: int) -> list[int]:
        """Every step up to `step` has ended. Returns all pages whose fence has thereby gone.

        Those that nobody has claimed are free. What the others contain is undefined until now.
        """
        passed: list[int] = []
        for page, last in self._fenced.items():
            if last > step:
                break
            passed.append(page)
        for page in passed:
            del self._fenced[page]
            if self._owner[page] is None:
                self._kinds[page] = _FREE
                self._num_free += 1
            else:
                self._num_unripe -= 1
        return passed

    def check_integrity(self) -> None:
        """Raises IntegrityError unless owners, counts, fences and the free count agree."""
        count: dict[Owner, int] = {}
        num_free = num_unripe = 0
        for page, owner in enumerate(self._owner):
            fenced = page in self._fenced
            if owner is not None:
                count[owner] = count.get(owner, 0) + 1
                num_unripe += fenced
                kind = _KIND[owner.kind]
            else:
                kind = _FENCED if fenced else _FREE
                num_free += not fenced
            if self._kinds[page] != kind:
                raise IntegrityError(f"page {page} of {owner} is on the wrong list")
        if (count, num_free, num_unripe) != (self._count, self._num_free, self._num_unripe):
            raise IntegrityError(
                f"counted {count}, {num_free} free, {num_unripe} unripe; booked {self._count}, "
                f"{self._num_free} free, {self._num_unripe} unripe"
            )
        fences = list(self._fenced.values())
        if fences != sorted(fences) or (fences and fences[-1] > self._fence_step):
            raise IntegrityError(f"fences out of order: {fences}")

    def _take(self, owner: Owner, pages: Iterable[int]) -> None:
        kind = _KIND[owner.kind]
        taken = 0
        for page in pages:
            self._owner[page] = owner
            self._kinds[page] = kind
            taken += 1
        if taken:
            self._count[owner] = self._count.get(owner, 0) + taken
        self._num_free -= taken

    def _drop(self, owner: Owner, pages: Iterable[int]) -> None:
        """Undo a `_take` of this very call: nothing can have touched the pages."""
        pages = list(pages)
        for page in pages:
            self._owner[page] = None
            self._kinds[page] = _FREE
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
