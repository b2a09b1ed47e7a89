"""Tables kept from step to step are those that would be written anew, whatever happens to them."""

import random

from engine.gpu import block_matrix
from engine.gpu.block_matrix import BlockMatrix
from engine.memory import RequestKv

PER_CHUNK = 3
GROUP = 1


def grown(rng: random.Random, kv: RequestKv, most: int) -> None:
    kv.tables[GROUP] += [rng.randrange(500) for _ in range(rng.randint(0, most))]


def test_random_lives() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        matrix = BlockMatrix(GROUP, PER_CHUNK)
        rows = [RequestKv(b"", [[], [7]], [0, 0]) for _ in range(rng.choice((3, 40)))]
        lows = dict.fromkeys(rows, 0)
        for _ in range(60):
            members = rng.sample(rows, rng.randint(1, len(rows)))
            for kv in members:
                grown(rng, kv, rng.choice((0, 0, 2, 30)))
                choice = rng.random()
                if choice < 0.1:
                    kv.tables[GROUP] = [rng.randrange(500)]
                    lows[kv] = 0
                    kv.rewritten()
                elif choice < 0.2:
                    place = rng.randrange(len(kv.tables[GROUP]))
                    kv.tables[GROUP][place] = rng.randrange(500)
                    kv.rewritten()
                elif choice < 0.4:  # a window moves on
                    lows[kv] = rng.randint(lows[kv], len(kv.tables[GROUP]) - 1)
            places = matrix.places(members, [lows[kv] for kv in members])
            assert len(set(places.tolist())) == len(members)
            for kv, place in zip(members, places.tolist(), strict=True):
                wanted = kv.tables[GROUP][lows[kv] :]
                chunk, slot = (
                    a[place, : len(wanted)].tolist() for a in (matrix.chunk, matrix.slot)
                )
                assert [c * PER_CHUNK + s for c, s in zip(chunk, slot, strict=True)] == wanted
                assert all(s < PER_CHUNK for s in slot)


def test_places_are_given_back() -> None:
    matrix = BlockMatrix(GROUP, PER_CHUNK)
    for _ in range(50):
        rows = [RequestKv(b"", [[], [5]], [0, 0]) for _ in range(block_matrix.FIRST_PLACES // 2)]
        matrix.places(rows, [0] * len(rows))
    assert len(matrix.chunk) == block_matrix.FIRST_PLACES
