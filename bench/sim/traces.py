"""Recorded traces as tables: the files of a data folder, or a CSV file of one's own.

Lives here: the formats. Does not: rates, repeats, who is which tenant. Sources, licences and how
the files were cut stand in the data folder's own README; nothing of them is shipped.

    azure2023_conv, azure2023_code            times and lengths
    mooncake_conversation, mooncake_synthetic times, lengths, ids of 512-token prompt blocks
    arena27_multimodel                        times, lengths, one of 27 models
    gentd26                                   times, tenants, models of an image service; lengths
                                              are drawn. For measuring only: its licence forbids
                                              to pass it on
    a path that ends in .csv or .csv.gz       columns t_s,in_tokens,out_tokens and, if there,
                                              tenant and model (any words)
"""

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.sim.batches import Floats, Ints, mixed
from bench.sim.random_lengths import DISTRIBUTIONS, LengthDistribution

BLOCK_TOKENS = 512
COMMON_SHARE = 0.05
"""A block in more of the requests than this is a system prompt: it makes no conversation."""
CSV_SUFFIXES = (".csv", ".csv.gz")


@dataclass(frozen=True, slots=True)
class Table:
    """A trace, sorted by time, its first request at 0.

    duration_s      a lap of it: to the last request and a mean gap more
    conversation    number of each row's conversation; a row of its own where nothing is shared
    tenant, model   labels by popularity in the trace, 0 the most popular; None where it has none
    blocks          ids of the prompts' blocks, None where prompts share nothing
    """

    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    conversation: Ints
    duration_s: float
    tenant: Ints | None = None
    model: Ints | None = None
    blocks: npt.NDArray[np.object_] | None = None

    @property
    def rate(self) -> float:
        """Mean requests a second."""
        return len(self.at_s) / self.duration_s


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The lines of a CSV file, plain or gzip, by column."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from csv.DictReader(text.decode().splitlines())


def read_csv(path: Path, lengths_from: LengthDistribution | None = None) -> Table:
    """A table from columns t_s, in_tokens, out_tokens and perhaps tenant, model.

    Lengths that the file lacks come from `lengths_from`. Raises ValueError on a file without the
    columns or without rows.
    """
    rows = list(read_rows(path))
    if not rows:
        raise ValueError(f"{path} has no rows")
    columns = rows[0].keys()
    if "t_s" not in columns:
        raise ValueError(f"{path} has no column 't_s'")
    if {"in_tokens", "out_tokens"} <= columns:
        prompt = np.array([int(row["in_tokens"]) for row in rows], np.int64)
        output = np.array([int(row["out_tokens"]) for row in rows], np.int64)
    elif lengths_from is not None:
        keys = mixed(np.arange(len(rows)), "lengths")
        prompt, output = lengths_from.draw(keys)
    else:
        raise ValueError(f"{path} has no columns 'in_tokens' and 'out_tokens'")
    return _table(
        np.array([float(row["t_s"]) for row in rows]),
        prompt,
        output,
        np.arange(len(rows), dtype=np.int64),
        tenant=_ranks([row["tenant"] for row in rows]) if "tenant" in columns else None,
        model=_ranks([row["model"] for row in rows]) if "model" in columns else None,
    )


def read_mooncake(path: Path) -> Table:
    """Prompts as blocks: requests whose blocks begin alike share a conversation and that text."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    blocks = np.empty(len(rows), np.object_)
    for place, row in enumerate(rows):
        blocks[place] = tuple(_ints(row["hash_ids"]))
    common = Counter(block for ids in blocks for block in set(ids))
    bound = COMMON_SHARE * len(rows)
    roots = [next((b for b in ids if common[b] <= bound), ids[-1]) for ids in blocks]
    return _table(
        np.array([_int(row["timestamp"]) / 1e3 for row in rows]),
        np.array([_int(row["input_length"]) for row in rows], np.int64),
        np.array([_int(row["output_length"]) for row in rows], np.int64),
        np.array(roots, np.int64),
        blocks=blocks,
    )


def _azure(name: str) -> Callable[[Path], Table]:
    return lambda data: read_csv(data / "traces" / f"{name}.csv.gz")


def _mooncake(name: str) -> Callable[[Path], Table]:
    return lambda data: read_mooncake(data / "traces" / f"{name}.jsonl.gz")


def _gentd26(data: Path) -> Table:
    return read_csv(data / "restricted" / "gentd26_requests.csv.gz", DISTRIBUTIONS["chat"])


TABLES: dict[str, Callable[[Path], Table]] = {
    "azure2023_conv": _azure("azure2023_conv"),
    "azure2023_code": _azure("azure2023_code"),
    "mooncake_conversation": _mooncake("mooncake_conversation"),
    "mooncake_synthetic": _mooncake("mooncake_synthetic"),
    "arena27_multimodel": _azure("arena27_multimodel"),
    "gentd26": _gentd26,
}


def _table(at_s: Floats, prompt: Ints, output: Ints, conversation: Ints, **more: Any) -> Table:
    order = np.argsort(at_s, kind="stable")
    at_s = at_s[order] - at_s.min()
    last = float(at_s[-1])
    gap = last / (len(at_s) - 1) if last > 0 else 1.0
    columns = {key: None if value is None else value[order] for key, value in more.items()}
    return Table(
        at_s,
        np.maximum(1, prompt[order]),
        np.maximum(1, output[order]),
        conversation[order],
        last + gap,
        **columns,
    )


def _ranks(words: Sequence[str]) -> Ints:
    """Each word's place among the words by how often they come; ties in order of the words."""
    counts = Counter(words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    ranks = {word: rank for rank, word in enumerate(ranked)}
    return np.array([ranks[word] for word in words], np.int64)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _ints(value: object) -> list[int]:
    assert isinstance(value, list)
    return value
