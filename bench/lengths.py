"""How long real requests are: prompts and answers of published data sets, as token counts.

Lives here: reading `prompts/arena_hard` (500 hard user prompts and how many tokens three models
answered with) and `traces/azure2023_{conv,code}` (two services of one provider) from a data folder,
cutting and scaling them to a model's context, drawing an endless stream of them. Does not: any text
or token ids beyond counting, arrival times.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench import arrivals

NAMES = ("arena_hard", "azure2023_conv", "azure2023_code")
# arena_hard comes without token counts of its prompts: counted with the data's own tokenizer.
TOKENIZER = "tokenizers/gpt2.tokenizer.json.gz"


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of one request; both at least 1."""

    prompt_tokens: int
    output_tokens: int

    def cut(self, context: int) -> "Length":
        """As a model with so many positions would take it: the answer goes before the prompt."""
        output = min(self.output_tokens, context - 1)
        return Length(min(self.prompt_tokens, context - output), output)

    def scaled(self, factor: float, max_prompt_tokens: int) -> "Length":
        """Both sides multiplied (1 at least), the prompt then cut."""
        prompt = max(1, round(self.prompt_tokens * factor))
        return Length(min(prompt, max_prompt_tokens), max(1, round(self.output_tokens * factor)))


def read(data: Path, name: str) -> list[Length]:
    """Every length of the set `name` of NAMES. Raises OSError where the data lack it."""
    if name == "arena_hard":
        return _arena_hard(data)
    if name not in NAMES:
        raise ValueError(f"lengths are known for {', '.join(NAMES)}, not {name!r}")
    rows = arrivals.trace(data / "traces" / f"{name}.csv.gz", num_requests=1 << 30)
    return [Length(row.prompt_tokens, row.output_tokens) for row in rows]


def stream(lengths: Sequence[Length], seed: int) -> Iterator[Length]:
    """The lengths in a random order, again and again, each time in another."""
    rng = random.Random(seed)
    order = list(lengths)
    while True:
        rng.shuffle(order)
        yield from order


def scale_to(lengths: Sequence[Length], context: int, max_prompt_tokens: int) -> float:
    """The factor, 1 at most, that makes the longest answer fit behind the longest prompt."""
    longest = max(length.output_tokens for length in lengths)
    return min(1.0, (context - max_prompt_tokens) / longest)


def read_tokenizer(data: Path) -> Tokenizer:
    """The tokenizer that the data are counted with."""
    with gzip.open(data / TOKENIZER, "rt", encoding="utf-8") as file:
        return Tokenizer.from_str(file.read())


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """The objects of a .jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _arena_hard(data: Path) -> list[Length]:
    tokenizer = read_tokenizer(data)
    found: list[Length] = []
    for row in read_rows(data / "prompts" / "arena_hard.jsonl.gz"):
        turns, answers = row["turns"], row["answer_tokens"]
        assert isinstance(turns, list)
        assert isinstance(answers, dict)
        prompt = len(tokenizer.encode("\n".join(turns), add_special_tokens=False).ids)
        found += [Length(max(1, prompt), max(1, tokens)) for tokens in answers.values()]
    return found
