"""What the prefix cache saves a hybrid on real prompts: BIG-Bench Hard, three examples a task.

All questions of a task begin with its examples (some 700 tokens). The questions are asked one by
one, in rounds of one question a task, of our engine with the prefix cache and without it, in turns;
the time to the first token is taken of each. Nothing is found of a task's first question; its
second sees where the two part, and keeps the states there; from the third on the examples are
taken up.

Lives here: the prompts, the rounds, the figures. Does not: the engines (`cpu_child.py`), the model.
The data is not part of the project: prefixes and questions as JSON lines, and a tokenizer, of which
only the ids matter, for the model's weights are random.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from tokenizers import Tokenizer

PREFIXES, QUESTIONS = "prompts/bbh_prefixes.jsonl.gz", "prompts/bbh_questions.jsonl.gz"
TOKENIZER = "tokenizers/gpt2.tokenizer.json.gz"
FOUND_FROM = 2
"""Rounds from this on find the examples' states."""

Ask = Callable[[Sequence[int]], float]
"""A prompt to the seconds until its first token."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and how many of its tokens are its task's examples."""

    task: str
    number: int
    ids: tuple[int, ...]
    shared: int


def rounds(data: Path, num_tasks: int, num_rounds: int) -> list[list[Question]]:
    """The first questions of the first tasks, by round. Raises OSError where the data is not."""
    tokenizer = Tokenizer.from_str(gzip.decompress((data / TOKENIZER).read_bytes()).decode())
    prefixes = {row["task"]: row["prefix"] for row in _rows(data / PREFIXES)}
    tasks = sorted(prefixes)[:num_tasks]
    asked: dict[str, list[str]] = {task: [] for task in tasks}
    for row in _rows(data / QUESTIONS):
        if row["task"] in asked:
            asked[row["task"]].append(row["input"])
    found = []
    for number in range(num_rounds):
        questions = []
        for task in tasks:
            prefix = prefixes[task] + "\n\n"
            ids = tokenizer.encode(f"{prefix}Q: {asked[task][number]}\nA:").ids
            shared = len(tokenizer.encode(prefix).ids)
            questions.append(Question(task, number, tuple(ids), shared))
        found.append(questions)
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def measure(questions: Sequence[Sequence[Question]], engines: Mapping[str, Ask]) -> dict[str, Any]:
    """Every question of every engine, in turns; the figures and what they are made of."""
    rows: list[dict[str, Any]] = []
    for one in questions:
        for question in one:
            seconds = {name: ask(question.ids) for name, ask in engines.items()}
            about = asdict(question) | {"ids": len(question.ids)}
            rows.append({**about, "ttft_s": seconds})
    return {"ttft_s": figures(rows), "questions": rows}


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By engine: the median of the rounds that find something, and the mean of all."""
    names = list(rows[0]["ttft_s"])
    late = [row for row in rows if row["number"] >= FOUND_FROM]
    return {
        name: {
            "first": median(row["ttft_s"][name] for row in rows if row["number"] == 0),
            "found": median(row["ttft_s"][name] for row in late),
            "mean": mean(row["ttft_s"][name] for row in rows),
        }
        for name in names
    }


def table(found: Mapping[str, Mapping[str, float]], base: str) -> str:
    """Seconds, and over those of the engine `base`."""
    lines = ["| engine | first question | from the third on | mean of all |", "|---|---|---|---|"]
    for name, row in found.items():
        cells = [f"{value:.2f} s ({value / found[base][key]:.2f}x)" for key, value in row.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
