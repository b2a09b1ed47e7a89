"""The nearest of up to some hundred thousand vectors, exactly, without an index's loss.

Comes in: keys and unit vectors (float32); goes out: keys and cosines. No entries, no scopes.

Reading all of 100,000 x 384 floats takes longer than a look-up may. So vectors are kept turned
into their principal axes (a rotation changes no cosine), the axes in blocks, the longest first.
With |r| for the length of what lies beyond a block, Cauchy-Schwarz bounds a cosine by what has been
read of it:

    x.q <= head(x).head(q) + |r(x)| |r(q)|

The first block is read for all rows, the next only where the bound reaches the floor and the k-th
best of those that look best. Of sentence embeddings the first 80 of 384 axes hold 64 % of the
squared length: of 100,000 questions some hundred are left after it, in hard cases some ten
thousand. (With 64 the median is a tenth better and the hard cases are a tenth worse, with 96 it is
the other way round.) What is found is what a full scan would find.

Large searches run in a thread, with the rows as they were when it began: rows are never moved, a
row that was written since is left out of the result. One thread: two for half of the rows each take
longer together (2.9 ms instead of 2.4, measured: each way into a thread and out of it waits for the
interpreter). The scan is handed to BLAS some rows at a time, too few for it to begin threads of its
own, which wait for one another wherever the machine is busy (measured: 1.6 ms became 15).
"""

import asyncio
from collections.abc import Callable, KeysView
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gateway.cache.types import Vector

BLOCKS = (80, 160)
"""Axes where a block ends; the last one ends with the axes."""
INLINE_ROWS = 2048
"""Up to here a search takes less than the way to a thread and back."""
SCAN_ROWS = 64
"""Handed to BLAS at a time."""
FIRST_FIT = 4096
FIT_AGAIN = 8
"""Times as many rows as when the axes were found: then they are found again."""
FIT_SAMPLE = 8192
FIRST_LOOK = 256
LARGE_ROWS = 4096
ROUNDING = 1e-5
PIECE = 4096
VECTOR_OVERHEAD = 1.5
"""Times a vector's own bytes: few rows grow by halves."""

_Matrix: TypeAlias = NDArray[np.float32]
_T = TypeVar("_T")


@dataclass(slots=True)
class _Rows:
    """Vectors in the axes `basis` [dims, dims] (None: as they came): `blocks` of them, each [rows,
    axes], and `beyond` [rows], the length of what lies beyond each block. A free row is 0
    throughout: no bound of it reaches any floor."""

    num_dims: int
    basis: _Matrix | None = None
    blocks: list[_Matrix] = field(default_factory=list)
    beyond: list[Vector] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.blocks:
            for begin, end in pairwise([0, *self._ends(), self.num_dims]):
                self.blocks.append(np.zeros((0, end - begin), np.float32))
                self.beyond.append(np.zeros(0, np.float32))

    def resize(self, num_rows: int) -> None:
        """New arrays: who reads the old ones goes on with them."""
        self.blocks = [_resized(block, num_rows) for block in self.blocks]
        self.beyond = [_resized(lengths, num_rows) for lengths in self.beyond]

    def put(self, rows: int | slice | NDArray[np.intp], vectors: _Matrix) -> None:
        """Vectors as they come."""
        turned = vectors if self.basis is None else vectors @ self.basis
        for number, part in enumerate(self._parts(turned)):
            self.blocks[number][rows] = part
        lengths = np.zeros(turned.shape[:-1], np.float32)
        for number in reversed(range(len(self.blocks))):
            self.beyond[number][rows] = np.sqrt(lengths)
            lengths = lengths + np.vecdot(self.blocks[number][rows], self.blocks[number][rows])

    def get(self, rows: slice | NDArray[np.intp]) -> _Matrix:
        """Vectors as they came."""
        turned = np.concatenate([block[rows] for block in self.blocks], axis=1)
        return turned if self.basis is None else turned @ self.basis.T

    def view(self, num_rows: int) -> "_Rows":
        """The first ones as they are now, for a thread."""
        blocks = [block[:num_rows] for block in self.blocks]
        beyond = [lengths[:num_rows] for lengths in self.beyond]
        return _Rows(self.num_dims, self.basis, blocks, beyond)

    def search(self, vector: Vector, k: int, floor: float) -> list[tuple[int, float]]:
        """(row, cosine), the nearest first."""
        parts = self._parts(vector if self.basis is None else vector @ self.basis)
        squares = np.cumsum([float(part @ part) for part in reversed(parts)])[::-1]
        far = [*np.sqrt(squares[1:]).tolist(), 0.0]
        found = _scanned(self.blocks[0], parts[0])
        bounds = found + self.beyond[0] * far[0]
        rows = np.flatnonzero(bounds >= floor - ROUNDING)
        num_likely = max(k, FIRST_LOOK)
        if len(rows) > 2 * num_likely:
            likely = rows[np.argpartition(bounds[rows], -num_likely)[-num_likely:]]
            best = np.partition(self._cosines(likely, parts), -k)[-k]
            rows = rows[bounds[rows] >= best - ROUNDING]
            floor = max(floor, float(best) - ROUNDING)
        found = found[rows]
        for number in range(1, len(parts)):
            found = found + _products(self.blocks[number], rows, parts[number])
            near = found + self.beyond[number][rows] * far[number] >= floor - ROUNDING
            rows, found = rows[near], found[near]
        order = np.argsort(-found, kind="stable")[:k]
        return [(int(rows[i]), float(found[i])) for i in order if found[i] >= floor]

    def _cosines(self, rows: NDArray[np.intp], parts: list[Vector]) -> Vector:
        found = np.zeros(len(rows), np.float32)
        for block, part in zip(self.blocks, parts, strict=True):
            found += _products(block, rows, part)
        return found

    def _parts(self, turned: _Matrix) -> list[_Matrix]:
        return np.split(turned, self._ends(), axis=-1)

    def _ends(self) -> list[int]:
        return [end for end in BLOCKS if end < self.num_dims]


class VectorIndex:
    """Used on the event loop only."""

    def __init__(self, num_dims: int) -> None:
        self.num_dims = num_dims
        self._rows = _Rows(num_dims)
        self._keys: list[bytes | None] = []
        self._row_of: dict[bytes, int] = {}
        self._free: list[int] = []
        self._written = np.zeros(0, np.int64)  # when a row was last written, in changes
        self._changes = 0
        self.num_fits = 0
        self._fitted_rows = 0
        self._fitting: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    @property
    def keys(self) -> KeysView[bytes]:
        """In no order."""
        return self._row_of.keys()

    async def settle(self) -> None:
        """Until no better axes are being looked for."""
        if self._fitting is not None:
            await asyncio.wait([self._fitting])

    def add(self, key: bytes, vector: Vector) -> None:
        """In place of the key's earlier vector, if there is one."""
        self.remove(key)
        row = self._free.pop() if self._free else len(self._keys)
        if row == len(self._keys):
            self._keys.append(None)
            if row == len(self._written):
                self._resize(_grown(row))
        self._keys[row] = key
        self._row_of[key] = row
        self._write(row)
        self._rows.put(row, vector)

    def remove(self, key: bytes) -> None:
        """Nothing where there is no such key."""
        row = self._row_of.pop(key, None)
        if row is not None:
            self._keys[row] = None
            self._free.append(row)
            self._write(row)
            self._rows.put(row, np.zeros(self.num_dims, np.float32))

    async def nearest(
        self, vector: Vector, k: int, floor: float, threads: Executor
    ) -> list[tuple[bytes, float]]:
        """At most k keys and their cosines, none below the floor (> 0), the nearest first."""
        num_rows, began = len(self._keys), self._changes
        view = self._rows.view(num_rows)
        if num_rows <= INLINE_ROWS:
            found = view.search(vector, k, floor)
        else:
            self._fit_where_due(threads)
            found = await _in_thread(threads, lambda: view.search(vector, k, floor))
        alive = [(self._keys[row], cosine, row) for row, cosine in found]
        return [(key, cos) for key, cos, row in alive if key and self._written[row] <= began]

    def _write(self, row: int) -> None:
        self._changes += 1
        self._written[row] = self._changes

    def _resize(self, num_rows: int) -> None:
        self._rows.resize(num_rows)
        self._written = np.concatenate(
            [self._written, np.zeros(num_rows - len(self._written), np.int64)]
        )

    def _fit_where_due(self, threads: Executor) -> None:
        num_rows = len(self._keys)
        if num_rows < max(FIRST_FIT, FIT_AGAIN * self._fitted_rows) or self._fitting is not None:
            return
        self._fitted_rows = num_rows
        self._fitting = asyncio.create_task(self._fit(num_rows, threads), name="cache-axes")

    async def _fit(self, num_rows: int, threads: Executor) -> None:
        began, view = self._changes, self._rows.view(num_rows)
        try:
            capacity = len(self._written)
            fitted = await _in_thread(threads, lambda: _fitted(view, capacity))
            if capacity < len(self._written):
                fitted.resize(len(self._written))
            late = np.flatnonzero(self._written[: len(self._keys)] > began)
            fitted.put(late, self._rows.get(late))
            self._rows = fitted
            self.num_fits += 1
        finally:
            self._fitting = None


def _grown(num_rows: int) -> int:
    """Copying many rows stops the event loop; memory that nobody has written to costs nothing."""
    return num_rows + max(1, num_rows // 2) if num_rows < LARGE_ROWS else num_rows * 8


def _fitted(rows: _Rows, capacity: int) -> _Rows:
    """The same vectors in axes by the share of their length that lies along them."""
    num_rows = len(rows.blocks[0])
    sample = rows.get(np.arange(0, num_rows, max(1, num_rows // FIT_SAMPLE)))
    _, axes = np.linalg.eigh(sample.T @ sample)
    fitted = _Rows(rows.num_dims, np.ascontiguousarray(axes[:, ::-1]).astype(np.float32))
    fitted.resize(capacity)
    for start in range(0, num_rows, PIECE):
        piece = slice(start, min(num_rows, start + PIECE))
        fitted.put(piece, rows.get(piece))
    return fitted


def _scanned(block: _Matrix, part: Vector) -> Vector:
    """The products of all rows."""
    num_rows, num_axes = block.shape
    end = num_rows - num_rows % SCAN_ROWS
    found = np.empty(num_rows, np.float32)
    pieces = block[:end].reshape(-1, SCAN_ROWS, num_axes)
    np.matmul(pieces, part, out=found[:end].reshape(-1, SCAN_ROWS))
    np.vecdot(block[end:], part, out=found[end:])
    return found


def _products(block: _Matrix, rows: NDArray[np.intp], part: Vector) -> Vector:
    found = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), PIECE):  # A few hundred rows, or all in a hard case.
        piece = slice(start, start + PIECE)
        found[piece] = np.vecdot(block[rows[piece]], part)
    return found


def _resized(array: NDArray[np.float32], num_rows: int) -> NDArray[np.float32]:
    resized = np.zeros((num_rows, *array.shape[1:]), np.float32)
    num_kept = min(num_rows, len(array))
    resized[:num_kept] = array[:num_kept]
    return resized


async def _in_thread(threads: Executor, work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
