"""Models of every kind of memory in one small arena: a few seconds here, minutes as a soak."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.memory_soak import (
    KINDS,
    MAX_GROWTH,
    MemorySoak,
    configs,
    growth,
    short_snapshots,
    soak,
)
from tests.engine.running.test_parity_mixes import Answer, Book
from tests.engine.tiny_models import make_tiny_models

SOAK_MINUTES = 5.0
FEW_PROMPTS = 4


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    """Each kind of memory, a few prompts of each."""
    return Book.of(make_tiny_models(tmp_path_factory.mktemp("kinds"), configs()), FEW_PROMPTS)


@pytest.fixture(autouse=True)
def _short_snapshots() -> Iterator[None]:
    with short_snapshots():
        yield


def test_a_few_seconds_of_it(book: Book) -> None:
    one = MemorySoak(book, 1)
    one.run(5 / 60, rest_every_s=2.0)
    result = one.result()
    one.close()
    assert one.problems == []
    assert result["events"]["requests"] > 20
    assert len(result["rests"]) >= 2
    for event in ("swaps", "hit tokens", "snapshots taken"):
        assert result["events"][event], event
    assert result["arena_pages"] < result["pages_of_all_weights"]


def test_an_answer_that_is_another_one_is_a_problem(book: Book) -> None:
    wrong = Book(book.models, book.prompts)
    for name, prompts in book.prompts.items():
        for prompt in prompts:
            answer = book.answer(name, prompt)
            tokens = [*answer.tokens[:2], *((token + 1) % 96 for token in answer.tokens[2:])]
            wrong.answers[name, tuple(prompt)] = Answer(tokens, answer.margins)
    one = MemorySoak(wrong, 2)
    one.run(2 / 60)
    one.close()
    assert any("token 2 is" in problem for problem in one.problems)


def test_growth_is_the_last_third_over_the_middle_one() -> None:
    assert growth([1.0, 9.0, 100.0, 100.0, 103.0, 103.0])["ratio"] == 1.03 > MAX_GROWTH
    assert growth([50.0, 100.0, 100.0])["ratio"] == 1.0
    assert growth([7.0])["ratio"] == 1.0


@pytest.mark.soak
def test_minutes_of_it(tmp_path: Path) -> None:
    result = soak(tmp_path, SOAK_MINUTES)
    assert result["problems"] == []
    for name in KINDS.values():
        assert result["events"][f"requests of {name}"] > 100
    for event in ("hit tokens", "preemptions", "swaps", "snapshots taken", "ended by abort"):
        assert result["events"][event], event
