"""Hashes and hits against a search that tries every length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import IntegrityError
from engine.memory.prefix_cache import PrefixIndex, extend_hashes, longest_hit, root_hash

BLOCK = 4


def hashes_of(tenant: str, tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(tenant), tokens, BLOCK, len(tokens) // BLOCK)
    return hashes


def test_a_hash_names_the_whole_prefix_and_its_tenant() -> None:
    tokens = list(range(12))
    assert hashes_of("a", tokens) == hashes_of("a", [*tokens, 99])
    assert not set(hashes_of("a", tokens)) & set(hashes_of("b", tokens))
    changed = hashes_of("a", [7, *tokens[1:]])
    assert not set(changed) & set(hashes_of("a", tokens)), "later blocks name earlier ones too"
    # The same tokens at another place of the sequence are something else.
    twice = hashes_of("a", [1, 2, 3, 4, 1, 2, 3, 4])
    assert twice[0] != twice[1]


def test_hashes_grow_as_the_tokens_become_known() -> None:
    tokens = [3, 1 << 40, 5, 7, 11, 13, 0, 2, 9]
    whole = hashes_of("t", tokens)
    hashes: list[bytes] = []
    for known in range(len(tokens) + 1):
        extend_hashes(hashes, root_hash("t"), tokens[:known], BLOCK, known // BLOCK)
        assert hashes == whole[: known // BLOCK]
    extend_hashes(hashes, root_hash("t"), tokens, BLOCK, 1)
    assert hashes == whole


@pytest.mark.parametrize("tenant", ["", "a", "tenant", "\u00e4"])
def test_roots_are_apart_from_each_other_and_from_blocks(tenant: str) -> None:
    assert root_hash(tenant) != root_hash(tenant + "x")
    assert root_hash(tenant) not in hashes_of(tenant, list(range(32)))


def test_of_two_blocks_with_one_content_the_first_keeps_the_name() -> None:
    index = PrefixIndex()
    assert index.add(b"h", 1)
    assert not index.add(b"h", 2)
    assert index.find(b"h") == 1
    assert 2 not in index
    index.remove(1)
    assert index.find(b"h") is None
    assert index.add(b"h", 2)
    index.rename(2, 9)
    assert index.find(b"h") == 9
    assert 2 not in index
    index.check_integrity()


def test_an_index_at_odds_with_itself_is_found_out() -> None:
    index = PrefixIndex()
    index.add(b"h", 1)
    index._hash[2] = b"h"
    with pytest.raises(IntegrityError):
        index.check_integrity()


@given(
    windows=st.lists(st.sampled_from([0, 0, 1, 3, 4, 5, 9, 30]), min_size=1, max_size=3),
    num_blocks=st.integers(0, 9),
    data=st.data(),
)
def test_the_longest_hit_is_the_longest(
    windows: list[int], num_blocks: int, data: st.DataObject
) -> None:
    hashes = hashes_of("t", list(range(num_blocks * BLOCK)))
    indexes = []
    for _ in windows:
        index = PrefixIndex()
        for i in data.draw(st.sets(st.integers(0, max(0, num_blocks - 1)))):
            if i < num_blocks:
                index.add(hashes[i], i)
        indexes.append(index)

    def holds(length: int) -> bool:
        for index, window in zip(indexes, windows, strict=True):
            seen = length * BLOCK - window + 1 if window else 0
            needed = range(max(0, seen) // BLOCK, length)
            if any(index.find(hashes[i]) is None for i in needed):
                return False
        return True

    expected = max(length for length in range(num_blocks + 1) if holds(length))
    assert longest_hit(indexes, windows, hashes, BLOCK) == expected
