"""The matrix finds what a full scan finds, whatever was added and removed meanwhile."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gateway.cache import matrix
from gateway.cache.matrix import VectorIndex
from gateway.cache.types import Vector

FLOOR = 0.7


def vectors(num: int, num_dims: int, seed: int = 0) -> Vector:
    """In clusters, along few of the axes, as embeddings are."""
    dice = np.random.default_rng(seed)
    centres = dice.standard_normal((max(1, num // 8), num_dims)) * 0.95 ** np.arange(num_dims)
    made = centres[dice.integers(len(centres), size=num)]
    made = made + 0.4 * dice.standard_normal((num, num_dims)) * 0.97 ** np.arange(num_dims)
    turn, _ = np.linalg.qr(dice.standard_normal((num_dims, num_dims)))
    made = made @ turn
    unit: Vector = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    return unit


def scan(kept: dict[bytes, Vector], vector: Vector, k: int) -> list[float]:
    """Cosines of the nearest."""
    cosines = sorted((float(one @ vector) for one in kept.values()), reverse=True)
    return [cosine for cosine in cosines[:k] if cosine >= FLOOR]


async def check(index: VectorIndex, kept: dict[bytes, Vector], asked: Vector, k: int = 4) -> int:
    """How many were found."""
    with ThreadPoolExecutor(1) as threads:
        found = 0
        for vector in asked:
            near = await index.nearest(vector, k, FLOOR, threads)
            assert [cos for _, cos in near] == pytest.approx(scan(kept, vector, k), abs=1e-5)
            assert all(float(kept[key] @ vector) == pytest.approx(c, abs=1e-5) for key, c in near)
            found += len(near)
        await index.settle()
    return found


async def test_finds_what_a_scan_finds() -> None:
    made = vectors(3000, 128)
    index, kept, dice = VectorIndex(128), dict[bytes, Vector](), random.Random(1)
    for number, vector in enumerate(made[:2500]):
        index.add(b"%d" % number, vector)
        kept[b"%d" % number] = vector
        if number % 3 == 2:
            gone = dice.choice(list(kept))
            index.remove(gone)
            del kept[gone]
        if number % 7 == 6:
            again = dice.choice(list(kept))
            kept[again] = made[dice.randrange(3000)]
            index.add(again, kept[again])
    assert len(index) == len(kept)
    assert set(index.keys) == set(kept)
    assert await check(index, kept, made[2500:2600]) > 50


async def test_turned_axes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "FIRST_FIT", 500)
    monkeypatch.setattr(matrix, "FIT_AGAIN", 2)
    monkeypatch.setattr(matrix, "INLINE_ROWS", 100)
    made = vectors(2500, 128)
    index, kept = VectorIndex(128), dict[bytes, Vector]()
    with ThreadPoolExecutor(1) as threads:
        for number, vector in enumerate(made[:2300]):
            index.add(b"%d" % number, vector)
            kept[b"%d" % number] = vector
            if number % 100 == 0:  # Fits begin here, and rows are written while they run.
                await index.nearest(vector, 1, FLOOR, threads)
            if number % 5 == 0:
                index.remove(b"%d" % (number // 2))
                kept.pop(b"%d" % (number // 2), None)
                await asyncio.sleep(0)
        assert await check(index, kept, made[2300:2400]) > 20
    assert index.num_fits >= 2


async def test_a_row_written_during_a_search_is_not_taken_for_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matrix, "INLINE_ROWS", 1)
    made = vectors(50, 128)
    index = VectorIndex(128)
    for number, vector in enumerate(made):
        index.add(b"%d" % number, vector)
    with ThreadPoolExecutor(1) as threads:
        search = asyncio.create_task(index.nearest(made[7], 1, FLOOR, threads))
        await asyncio.sleep(0)
        index.remove(b"7")
        index.add(b"new", made[7])
        assert [key for key, _ in await search] != [b"7"]


async def test_without_anything_near_there_is_nothing() -> None:
    index = VectorIndex(4)
    with ThreadPoolExecutor(1) as threads:
        assert await index.nearest(np.array([1, 0, 0, 0], np.float32), 3, FLOOR, threads) == []
        index.add(b"a", np.array([0, 1, 0, 0], np.float32))
        assert await index.nearest(np.array([1, 0, 0, 0], np.float32), 3, FLOOR, threads) == []
        index.remove(b"a")
        index.remove(b"a")
        assert await index.nearest(np.array([0, 1, 0, 0], np.float32), 3, FLOOR, threads) == []
    assert len(index) == 0
