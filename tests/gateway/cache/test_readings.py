"""Questions are read once, in turn with others, and remembered within bounds."""

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from gateway.cache import readings
from gateway.cache.readings import CHARS_AT_A_TIME, Readings, bytes_of
from gateway.cache.types import CachedAnswer, Entry, Neighbour, Scope
from gateway.policy.cache_choice import choose
from gateway.policy.cache_confidence import Calibration
from gateway.policy.cache_reading import LONGEST_CHARS, Reading, read
from tests.gateway.policy.decisions_kit import FAMILIES

MIB = 1 << 20


def neighbour(number: int, question: str) -> Neighbour:
    entry = Entry(
        entry_id=f"req_{number}",
        key_id="key_1",
        scope=Scope("ten_1", "tiny", b"scope"),
        exact_key=b"key",
        question=question,
        vector=np.zeros(2, np.float32),
        answer=CachedAnswer("answer", "stop", 1),
        cost_nanos=0,
        made_at=0.0,
        expires_at=1.0,
        epoch=b"",
    )
    return Neighbour(entry, 0.9 - 0.01 * number)


def near_of(texts: Sequence[str]) -> list[Neighbour]:
    return [neighbour(number, text) for number, text in enumerate(texts)]


@pytest.fixture
def texts_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read_now: list[str] = []

    def noted(text: str) -> Reading:
        read_now.append(text)
        return read(text)

    monkeypatch.setattr(readings, "read", noted)
    return read_now


async def test_a_kept_question_is_read_once(texts_read: list[str]) -> None:
    remembered = Readings(MIB)
    near = near_of(["What is a lease?", "What is a ticket?"])
    for _ in range(3):
        await remembered.of("What's a lease?", near, remembered.num_forgotten)
    assert texts_read.count("What is a lease?") == texts_read.count("What is a ticket?") == 1
    assert texts_read.count("What's a lease?") == 3


async def test_another_tenants_question_of_the_same_words_is_read_all_the_same(
    texts_read: list[str],
) -> None:
    """What a look-up takes says nothing of what others have asked."""
    remembered = Readings(MIB)
    await remembered.of(
        "What is a lease?", [neighbour(1, "What is a ticket?")], remembered.num_forgotten
    )
    texts_read.clear()
    await remembered.of(
        "What is a lease?", [neighbour(2, "What is a ticket?")], remembered.num_forgotten
    )
    assert texts_read == ["What is a lease?", "What is a ticket?"]


async def test_an_entry_of_the_same_id_and_another_question_is_not_taken_for_it() -> None:
    remembered = Readings(MIB)
    await remembered.of("?", [neighbour(1, "Is it 7?")], remembered.num_forgotten)
    _, (candidate,) = await remembered.of("?", [neighbour(1, "Is it 8?")], remembered.num_forgotten)
    assert candidate.reading == read("Is it 8?")


async def test_a_purge_leaves_no_words(texts_read: list[str]) -> None:
    remembered = Readings(MIB)
    near = near_of(["What is a lease?"])
    await remembered.of("?", near, remembered.num_forgotten)
    remembered.forget()
    assert remembered.num_bytes == 0
    await remembered.of("?", near, remembered.num_forgotten)
    assert texts_read.count("What is a lease?") == 2


async def test_what_was_found_before_a_purge_is_not_remembered_after_it() -> None:
    """Neither where the store was asked before, nor where a turn of others' lies between."""
    remembered = Readings(MIB)
    before = remembered.num_forgotten
    remembered.forget()
    await remembered.of("?", near_of(["What is a lease?"]), before)
    assert remembered.num_bytes == 0
    long = near_of([f"{number} " * CHARS_AT_A_TIME for number in range(4)])
    asked = asyncio.create_task(remembered.of("?", long, remembered.num_forgotten))
    await asyncio.sleep(0)
    assert remembered.num_bytes > 0, "some are read before the purge"
    remembered.forget()
    _, candidates = await asked
    assert remembered.num_bytes == 0
    assert [one.reading for one in candidates] == [read(one.question) for one in candidates]


@pytest.mark.parametrize("max_bytes", [0, 1000, 100_000])
async def test_what_is_remembered_is_bounded_and_decides_nothing(max_bytes: int) -> None:
    draw, remembered = random.Random(5), Readings(max_bytes)
    for family in ("plain", "names", "one set of numbers"):
        texts = [FAMILIES[family](draw) for _ in range(9)]
        near = near_of(texts[1:])
        for _ in range(2):
            asked, candidates = await remembered.of(texts[0], near, remembered.num_forgotten)
            verdict = choose(texts[0], candidates, Calibration(), 0.05, 0.5, reading=asked)
            bare = [readings.candidate_of(one) for one in near]
            assert verdict == choose(texts[0], bare, Calibration(), 0.05, 0.5)
            assert remembered.num_bytes <= max_bytes
    assert (remembered.num_bytes > 0) == (max_bytes > 1000)


async def test_others_have_their_turn_between_long_questions(texts_read: list[str]) -> None:
    """Never is more read in one go than one question and what is short."""
    read_before = []

    async def beside() -> None:
        while True:
            read_before.append(len(texts_read))
            await asyncio.sleep(0)

    other = asyncio.create_task(beside())
    await asyncio.sleep(0)
    long = [f"{number} " * CHARS_AT_A_TIME for number in range(9)]
    await Readings(MIB).of(long[0], near_of(long[1:]), 0)
    other.cancel()
    turns = [*read_before, len(texts_read)]
    assert max(after - before for before, after in pairwise(turns)) == 1
    assert len(texts_read) == 9


HOSTILE: dict[str, Callable[[random.Random], str]] = {
    **FAMILIES,
    "quotes": lambda draw: '"a"' * 666,
    "numbers with a point": lambda draw: " ".join(str(draw.random())[:6] for _ in range(400)),
    "capitals": lambda draw: " ".join("".join(draw.choices("ABCDEFG", k=3)) for _ in range(500)),
    "cyrillic": lambda draw: " ".join(
        chr(0x400 + int(draw.random() * 250)) + chr(0x400 + int(draw.random() * 250))
        for _ in range(700)
    ),
    "signs": lambda draw: "\U0001f600a " * 666,
    "letters and figures": lambda draw: "".join(
        chr(draw.randrange(0x4E00, 0x9FFF)) + draw.choice("0123456789") for _ in range(1000)
    ),
    "quoted letters": lambda draw: "".join(
        f'"{chr(draw.randrange(0x4E00, 0x9FFF))}"' for _ in range(666)
    ),
    "short names": lambda draw: " ".join(
        "A" + chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(666)
    ),
    "runs": lambda draw: "".join(draw.choices("日の本テ", k=2000)),
    "far beyond": lambda draw: "\U0001f600" * 50_000,
    "nothing": lambda draw: "",
}


@pytest.mark.parametrize("family", HOSTILE)
def test_no_reading_takes_more_than_it_is_counted(family: str) -> None:
    draw = random.Random(2)
    texts = [HOSTILE[family](draw) for _ in range(8)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [read(text) for text in texts]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = sum(bytes_of(reading) for reading in kept)
    assert taken <= counted
    assert counted <= len(texts) * (3000 + 550 * LONGEST_CHARS) + 4 * sum(map(len, texts))
