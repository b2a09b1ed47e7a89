"""Constrained generations by the thousand: how many end in time, how many are what was asked for.

    python -m bench.constrained walk DATA     random walks over a real tokenizer, no model: requests
                                              go through the gateway's checks and plan, the worker's
                                              compiler and matcher, the gateway's parser
    python -m bench.constrained http DATA --url http://127.0.0.1:8000/v1 --model NAME --key KEY
                                              the same cases sent to a server

Prints one JSON object. `finished`: ended within its token budget; `valid`: of those, what obeys the
schema by jsonschema, and calls an offered function; `refused`: with a reason, before any token.
"""

import argparse
import asyncio
import collections
import gzip
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
import numpy as np
from tokenizers import Tokenizer

from bench.constrained_cases import SOURCES, Case
from engine.constraints.structured import Compiler, Matcher
from engine.errors import ConstraintBroken, ConstraintRefused
from engine.protocol import Constraint
from gateway.answer.detokenize import PieceTable, TextStream
from gateway.answer.output_plan import OutputFormats, OutputPlan, plan
from gateway.answer.tool_deltas import message
from gateway.answer.tools.formats import FORMATS
from gateway.errors import ApiError
from gateway.prepare.structured_request import understand
from gateway.prepare.tool_types import ResponseFormat, ToolChoice, Tools

_MAX_PROBLEMS = 20


class _Fields(msgspec.Struct):
    """The fields of a request that wire.py would decode."""

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None


@dataclass(slots=True)
class Tally:
    """Counts by kind of case."""

    counts: dict[str, collections.Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    spent_s: dict[str, float] = field(
        default_factory=lambda: {"compile": 0.0, "mask": 0.0, "accept": 0.0}
    )
    num_tokens: int = 0

    def add(self, case: Case, result: str, why: str = "") -> None:
        """`result`: valid, invalid, unfinished, broken (out of fuel in the middle) or refused."""
        kind = case.kind.split()[0]
        self.counts.setdefault(kind, collections.Counter())[result] += 1
        if result == "refused":
            self.reasons[why[:100]] += 1
        elif why and len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(f"{case.name}: {result}: {why}")

    def report(self) -> dict[str, Any]:
        """What is printed."""
        total: collections.Counter[str] = collections.Counter()
        for counts in self.counts.values():
            total.update(counts)
        finished = total["valid"] + total["invalid"]
        ran = finished + total["unfinished"] + total["broken"]
        return {
            "kinds": {kind: dict(counts) for kind, counts in self.counts.items()},
            "total": dict(total),
            "finished_share": finished / max(ran, 1),
            "valid_share": total["valid"] / max(finished, 1),
            "tokens": self.num_tokens,
            "us_per_token": {k: s / max(self.num_tokens, 1) * 1e6 for k, s in self.spent_s.items()},
            "refused": self.reasons.most_common(12),
            "problems": self.problems,
        }


class Logits(Protocol):
    """Where logits come from: a model, or chance."""

    def next(self, token_ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Float32 [vocab]."""


class RandomLogits:
    """Normal noise, of the spread that a model with random weights has."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def next(self, token_ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Independent of what was written."""
        return self._rng.standard_normal(self._vocab_size, dtype=np.float32)


class Walker:
    """Generates as a worker would, one row, greedy over the logits that the mask leaves."""

    def __init__(self, tokenizer_json: Path, logits: Logits | None, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        vocab_size = self._tokenizer.get_vocab_size()
        added = self._tokenizer.get_added_tokens_decoder()
        self._eos_ids = [i for i, t in added.items() if t.special][:1] or [vocab_size - 1]
        self._pieces = PieceTable(self._tokenizer)
        self._compiler = Compiler(tokenizer_json, vocab_size, self._eos_ids)
        self._logits = logits or RandomLogits(vocab_size, seed)
        self._vocab_size = vocab_size
        self.special_ids = {t.content: i for i, t in added.items() if t.special}

    def text(self, constraint: Constraint, max_tokens: int, tally: Tally) -> tuple[str, bool]:
        """(text, whether it ended by itself). Raises ConstraintRefused, ConstraintBroken."""
        start_s = time.perf_counter()
        grammar = self._compiler.compile(constraint)
        matcher = Matcher(grammar)
        tally.spent_s["compile"] += time.perf_counter() - start_s
        row = bytearray(grammar.mask_bytes)
        stream = TextStream(self._pieces, (), self._eos_ids)
        out: list[int] = []
        pieces: list[str] = []
        for _ in range(max_tokens):
            start_s = time.perf_counter()
            matcher.mask_into(memoryview(row))
            tally.spent_s["mask"] += time.perf_counter() - start_s
            bits = np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little")
            logits = np.where(bits[: self._vocab_size] == 1, self._logits.next(out), -np.inf)
            token = int(logits.argmax())
            if not bits[token]:  # a tokenizer without the characters that have to come
                return "".join(pieces), False
            start_s = time.perf_counter()
            matcher.accept(token)
            tally.spent_s["accept"] += time.perf_counter() - start_s
            tally.num_tokens += 1
            out.append(token)
            pieces.append(stream.push([token]))
            if token in self._eos_ids:
                return "".join(pieces) + stream.finish(), True
        return "".join(pieces) + stream.finish(), matcher.finished


def planned(case: Case, special_ids: Mapping[str, int]) -> OutputPlan:
    """What the gateway makes of a case. Raises ApiError."""
    fields = msgspec.convert(case.body, _Fields)
    asked = understand(
        fields.tools or (),
        fields.tool_choice,
        fields.parallel_tool_calls is not False,
        fields.response_format,
    )
    return plan(asked, OutputFormats(FORMATS[case.format], special_ids=special_ids), "")


def walk(walker: Walker, cases: Iterator[Case], max_tokens: int) -> Tally:
    """All cases on one thread."""
    tally = Tally()
    for case in cases:
        try:
            # The formats' marks as plain text: this tokenizer was made for none of them.
            found = planned(case, {})
            if found.constraint is None:
                tally.add(case, "invalid", "nothing constrains it")
                continue
            text, has_ended = walker.text(found.constraint, max_tokens, tally)
        except (ApiError, ConstraintRefused, msgspec.ValidationError) as error:
            tally.add(case, "refused", str(error))
            continue
        except ConstraintBroken as error:
            tally.add(case, "broken", str(error))
            continue
        if not has_ended:
            tally.add(case, "unfinished", text[-120:])
            continue
        parser = found.new_parser()
        problem = case.problem(message([*parser.feed(text), *parser.flush()]))
        tally.add(
            case, "invalid" if problem else "valid", f"{problem}: {text[:300]}" if problem else ""
        )
    return tally


async def http(args: argparse.Namespace, cases: Iterator[Case]) -> Tally:
    """All cases through a server, some at a time."""
    tally = Tally()
    headers = {"authorization": f"Bearer {args.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def work() -> None:
            for case in cases:
                await _ask(session, args, case, tally)

        await asyncio.gather(*(work() for _ in range(args.concurrency)))
    return tally


async def _ask(
    session: aiohttp.ClientSession, args: argparse.Namespace, case: Case, tally: Tally
) -> None:
    body = {
        "model": args.model.replace("{format}", case.format),
        "messages": case.messages,
        "max_completion_tokens": args.max_tokens,
        "seed": args.seed,
        **case.body,
    }
    async with session.post(f"{args.url}/chat/completions", json=body) as response:
        answer = await response.json()
    if response.status == 400:
        tally.add(case, "refused", answer["error"]["message"])
        return
    if response.status != 200:
        tally.add(case, "invalid", f"status {response.status}: {answer}")
        return
    tally.num_tokens += answer["usage"]["completion_tokens"]
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        tally.add(case, "unfinished", str(choice["message"])[-120:])
        return
    problem = case.problem(choice["message"])
    tally.add(case, "invalid" if problem else "valid", problem or "")


def _unpacked(path: Path, folder: Path) -> Path:
    """A tokenizer.json, out of its gzip file if it is in one."""
    if path.suffix != ".gz":
        return path
    out = folder / "tokenizer.json"
    out.write_bytes(gzip.decompress(path.read_bytes()))
    return out


def case_source(args: argparse.Namespace) -> Iterator[Case]:
    """What is asked for, from the command line's words."""
    sources = [SOURCES[kind](args.data, args.seed, not args.unbounded) for kind in args.kinds]
    turns = zip(*sources, strict=False) if len(sources) > 1 else ((case,) for case in sources[0])
    return itertools.islice(itertools.chain.from_iterable(turns), args.num)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("walk", "http"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=tuple(SOURCES), default=["call", "schema"])
    parser.add_argument("--unbounded", action="store_true", help="schemas as they are")
    parser.add_argument(
        "--tokenizer", default="gpt2.tokenizer.json.gz", help="walk: a file in DATA"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--model", default="", help='http: "{format}" in it stands for a case\'s format'
    )
    parser.add_argument("--key", default="")
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    if args.way == "http":
        tally = asyncio.run(http(args, case_source(args)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = _unpacked(args.data / "tokenizers" / args.tokenizer, Path(folder))
            tally = walk(Walker(path, None, args.seed), case_source(args), args.max_tokens)
    print(json.dumps(tally.report(), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
