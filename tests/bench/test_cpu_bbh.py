"""Real prompts with shared examples: how they are made, and what the figures are of."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bench.cpu_bbh import PREFIXES, QUESTIONS, TOKENIZER, figures, measure, rounds, table

WORDS = ("one", "two", "three", "Q", ":", "A", "example", "other")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def data_of(folder: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="one"))
    tokenizer.pre_tokenizer = Whitespace()
    write(folder / TOKENIZER, tokenizer.to_str())
    prefixes = [{"task": "b", "prefix": "example example"}, {"task": "a", "prefix": "other"}]
    write(folder / PREFIXES, "\n".join(map(json.dumps, prefixes)))
    asked = [(task, word) for word in ("two", "three") for task in ("b", "a", "c")]
    questions = [{"task": task, "input": word} for task, word in asked]
    write(folder / QUESTIONS, "\n".join(map(json.dumps, questions)))
    return folder


def test_a_round_is_one_question_of_each_task(tmp_path: Path) -> None:
    found = rounds(data_of(tmp_path), 2, 2)
    assert [[(q.task, q.number, q.shared) for q in one] for one in found] == [
        [("a", 0, 1), ("b", 0, 2)],
        [("a", 1, 1), ("b", 1, 2)],
    ]
    words = [WORDS[i] for i in found[1][1].ids]
    assert words == ["example", "example", "Q", ":", "three", "A", ":"]


def test_figures_are_of_the_rounds_that_find_something(tmp_path: Path) -> None:
    one, two = rounds(data_of(tmp_path), 2, 2)
    later = [replace(question, number=2) for question in one]
    asked: list[int] = []

    def slow(ids: object) -> float:
        asked.append(0)
        return 4.0

    times = iter([4.0, 4.0, 4.0, 4.0, 1.0, 1.0])
    found = measure([one, two, later], {"plain": slow, "cached": lambda ids: next(times)})
    assert len(asked) == 6
    assert found["ttft_s"] == figures(found["questions"])
    assert found["ttft_s"]["cached"] == {"first": 4.0, "found": 1.0, "mean": 3.0}
    assert "| cached | 4.00 s (1.00x) | 1.00 s (0.25x) | 3.00 s (0.75x) |" in table(
        found["ttft_s"], "plain"
    )
