"""The index finds what a full scan finds, whatever was added and removed meanwhile; copies of
vectors that lie elsewhere are bounded, read on, and read anew when most are gone."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gateway.cache import vector_index
from gateway.cache.types import Vector
from gateway.cache.vector_index import RedisVectorMirror, VectorIndex
from tests.gateway.cache.answers_kit import MIB, vector_of

FLOOR = 0.7


def vectors(num: int, num_dims: int, seed: int = 0) -> Vector:
    """In clusters, as embeddings are."""
    dice = np.random.default_rng(seed)
    centres = dice.standard_normal((max(1, num // 8), num_dims))
    made = centres[dice.integers(len(centres), size=num)]
    made = made + 0.4 * dice.standard_normal((num, num_dims))
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


async def test_many_rows_are_searched_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "INLINE_SIZE", 100)
    made = vectors(1100, 128)
    index, kept = VectorIndex(128), dict[bytes, Vector]()
    for number, vector in enumerate(made[:1000]):
        index.add(b"%d" % number, vector)
        kept[b"%d" % number] = vector
        if number % 5 == 0:
            index.remove(b"%d" % (number // 2))
            kept.pop(b"%d" % (number // 2), None)
    assert await check(index, kept, made[1000:]) > 20


async def test_a_row_written_during_a_search_is_not_taken_for_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vector_index, "INLINE_SIZE", 1)
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


class Elsewhere:
    """Members of sets in the order in which they were added."""

    def __init__(self) -> None:
        self.members: dict[bytes, dict[bytes, tuple[int, Vector]]] = {}
        self.work: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.num_added = 0
        self.num_read = 0

    def add(self, set_id: bytes, name: bytes) -> None:
        self.num_added += 1
        row = (self.num_added, vector_of(name.decode()))
        self.members.setdefault(set_id, {})[name] = row

    def since(self, set_id: bytes) -> Callable[[bytes, int], Coroutine[Any, Any, list[Any]]]:
        async def since(after: bytes, limit: int) -> list[Any]:
            members = self.members.get(set_id, {})
            later = [
                (name, b"%d" % when, vector.astype(np.float16).tobytes())
                for name, (when, vector) in members.items()
                if when > int(after)
            ]
            self.num_read += len(later[:limit])
            return [len(members), *later[:limit]]

        return since

    def later(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        self.work.append(work)
        return True

    async def settle(self) -> None:
        while self.work:
            await self.work.pop()()


async def look(
    mirror: RedisVectorMirror, there: Elsewhere, set_id: bytes, name: bytes
) -> list[bytes]:
    """Names that are nearest to one's own vector."""
    await mirror.read(set_id, there.since(set_id), there.later)
    near = await mirror.nearest(set_id, vector_of(name.decode()), 1, 0.9)
    return [found for found, _ in near]


@pytest.fixture
def there() -> Elsewhere:
    return Elsewhere()


async def test_what_is_added_is_found_and_read_once(there: Elsewhere) -> None:
    mirror = RedisVectorMirror(MIB)
    there.add(b"s", b"a")
    assert await look(mirror, there, b"s", b"a") == [b"a"]
    there.add(b"s", b"b")
    assert await look(mirror, there, b"s", b"b") == [b"b"]
    assert await look(mirror, there, b"other", b"b") == []
    assert there.num_read == 2
    mirror.remove(b"s", b"a")
    assert await look(mirror, there, b"s", b"a") == []
    mirror.close()


async def test_a_large_one_is_read_on_afterwards(there: Elsewhere) -> None:
    mirror = RedisVectorMirror(64 * MIB)
    for number in range(2000):
        there.add(b"s", b"%d" % number)
    assert await look(mirror, there, b"s", b"1999") == []
    assert await look(mirror, there, b"s", b"0") == [b"0"]
    assert len(there.work) == 1
    await there.settle()
    assert await look(mirror, there, b"s", b"1999") == [b"1999"]
    assert there.num_read == 2000
    mirror.close()


async def test_the_one_asked_for_longest_ago_goes_first(there: Elsewhere) -> None:
    mirror = RedisVectorMirror(3 * vector_index.SCOPE_OVERHEAD_BYTES + 3 * 1024)
    for name in (b"a", b"b", b"c", b"a", b"d"):
        there.add(name, name)
        assert await look(mirror, there, name, name) == [name]
        assert mirror.num_bytes <= 3 * vector_index.SCOPE_OVERHEAD_BYTES + 3 * 1024
    assert await mirror.nearest(b"b", vector_of("b"), 1, 0.9) == []
    assert await mirror.nearest(b"a", vector_of("a"), 1, 0.9) != []
    mirror.close()


async def test_one_that_is_mostly_gone_is_read_anew(there: Elsewhere) -> None:
    mirror = RedisVectorMirror(64 * MIB)
    for number in range(400):
        there.add(b"s", b"%d" % number)
    await look(mirror, there, b"s", b"0")
    await there.settle()
    before = mirror.num_bytes
    there.members[b"s"] = {b"7": there.members[b"s"][b"7"]}
    await look(mirror, there, b"s", b"7")
    await there.settle()
    assert await look(mirror, there, b"s", b"7") == [b"7"]
    assert await look(mirror, there, b"s", b"8") == []
    assert mirror.num_bytes < before / 10
    mirror.clear()
    assert mirror.num_bytes == 0
    mirror.close()
