"""Copies of vectors that lie elsewhere: bounded, read on, and read anew when most are gone."""

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from gateway.cache import near_matrix
from gateway.cache.near_matrix import NearMatrix
from gateway.cache.types import Vector
from tests.gateway.cache.answers_kit import vector_of

MIB = 1024 * 1024


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


async def look(matrix: NearMatrix, there: Elsewhere, set_id: bytes, name: bytes) -> list[bytes]:
    """Names that are nearest to one's own vector."""
    await matrix.read(set_id, there.since(set_id), there.later)
    near = await matrix.nearest(set_id, vector_of(name.decode()), 1, 0.9)
    return [found for found, _ in near]


@pytest.fixture
def there() -> Elsewhere:
    return Elsewhere()


async def test_what_is_added_is_found_and_read_once(there: Elsewhere) -> None:
    matrix = NearMatrix(MIB)
    there.add(b"s", b"a")
    assert await look(matrix, there, b"s", b"a") == [b"a"]
    there.add(b"s", b"b")
    assert await look(matrix, there, b"s", b"b") == [b"b"]
    assert await look(matrix, there, b"other", b"b") == []
    assert there.num_read == 2
    matrix.remove(b"s", b"a")
    assert await look(matrix, there, b"s", b"a") == []
    matrix.close()


async def test_a_large_one_is_read_on_afterwards(there: Elsewhere) -> None:
    matrix = NearMatrix(64 * MIB)
    for number in range(2000):
        there.add(b"s", b"%d" % number)
    assert await look(matrix, there, b"s", b"1999") == []
    assert await look(matrix, there, b"s", b"0") == [b"0"]
    assert len(there.work) == 1
    await there.settle()
    assert await look(matrix, there, b"s", b"1999") == [b"1999"]
    assert there.num_read == 2000
    matrix.close()


async def test_the_one_asked_for_longest_ago_goes_first(there: Elsewhere) -> None:
    matrix = NearMatrix(3 * near_matrix.SCOPE_OVERHEAD_BYTES + 3 * 1024)
    for name in (b"a", b"b", b"c", b"a", b"d"):
        there.add(name, name)
        assert await look(matrix, there, name, name) == [name]
        assert matrix.num_bytes <= 3 * near_matrix.SCOPE_OVERHEAD_BYTES + 3 * 1024
    assert await matrix.nearest(b"b", vector_of("b"), 1, 0.9) == []
    assert await matrix.nearest(b"a", vector_of("a"), 1, 0.9) != []
    matrix.close()


async def test_one_that_is_mostly_gone_is_read_anew(there: Elsewhere) -> None:
    matrix = NearMatrix(64 * MIB)
    for number in range(400):
        there.add(b"s", b"%d" % number)
    await look(matrix, there, b"s", b"0")
    await there.settle()
    before = matrix.num_bytes
    there.members[b"s"] = {b"7": there.members[b"s"][b"7"]}
    await look(matrix, there, b"s", b"7")
    await there.settle()
    assert await look(matrix, there, b"s", b"7") == [b"7"]
    assert await look(matrix, there, b"s", b"8") == []
    assert matrix.num_bytes < before / 10
    matrix.clear()
    assert matrix.num_bytes == 0
    matrix.close()
