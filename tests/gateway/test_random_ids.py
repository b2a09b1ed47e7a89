"""Random bytes: none given out twice, whatever is asked for."""

import itertools

from gateway.random_ids import RandomBytes


def test_no_byte_is_given_out_twice() -> None:
    numbers = itertools.count()
    made: list[bytes] = []

    def source(num_bytes: int) -> bytes:
        made.append(b"".join(next(numbers).to_bytes(4, "big") for _ in range(num_bytes // 4)))
        return made[-1]

    random = RandomBytes(source)
    taken = [random.take(size) for _ in range(500) for size in (16, 8, 4)]
    assert {len(piece) for piece in taken} == {16, 8, 4}
    words = [piece[at : at + 4] for piece in taken for at in range(0, len(piece), 4)]
    assert len(set(words)) == len(words)
    assert len(made) == 4


def test_two_of_them_have_nothing_in_common() -> None:
    first, second = RandomBytes(), RandomBytes()
    assert not {first.take(16) for _ in range(300)} & {second.take(16) for _ in range(300)}
