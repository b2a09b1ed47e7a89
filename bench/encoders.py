"""`python -m bench.encoders DATA`: encoders on one core, batched and one by one.

    mixed      a MiniLM-shaped random model embeds texts: one request a text, one after the other,
               and all in one request that the engine cuts into steps; the ratio of both
    classify   a BERT-shaped random classifier with 77 labels, all texts in one request

Both through a whole `Engine` (submit, step, rows), so that what it costs beside the model counts on
both sides; `alone_by_transformers` is the library's own forward, a text at a time, without an
engine. DATA is a `.jsonl.gz` whose rows have a `text`, which gives the lengths. Random models have
no tokenizer: a text counts a token for each word and punctuation mark, one more for each four
letters of a word beyond five, and two special ones. Ids and weights are random, which changes
nothing in what a step costs.
"""

import argparse
import gzip
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig

from bench import machine
from engine.backend.cpu import CpuBackend
from engine.config import EngineConfig
from engine.encoders.encoder_queue import STEP_TOKENS
from engine.engine import Engine
from engine.packs.convert import inspect, write_pack
from engine.protocol import EncodeInputs, ModelSpec, SamplingParams, Submit

MODEL = "encoder"
VOCAB = 30522
LONGEST = 512
MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
BERT: dict[str, Any] = {}
_PIECES = re.compile(r"\w+|[^\w\s]")


def text_lengths(path: Path, num_texts: int, seed: int) -> list[int]:
    """Tokens of so many texts, drawn from the file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [str(json.loads(line)["text"]) for line in file]
    drawn = random.Random(seed).choices(texts, k=num_texts)
    return [min(LONGEST, count_tokens(text)) for text in drawn]


def count_tokens(text: str) -> int:
    """About what a WordPiece vocabulary would make of it."""
    return 2 + sum(1 + max(0, len(word) - 5) // 4 for word in _PIECES.findall(text))


class Rig:
    """One encoder in an engine, stepped by hand."""

    def __init__(self, folder: Path, shape: dict[str, Any], num_labels: int = 0) -> None:
        torch.manual_seed(0)
        config = BertConfig(vocab_size=VOCAB, **shape)
        kind: Any = AutoModel
        if num_labels:
            kind, config.num_labels = AutoModelForSequenceClassification, num_labels
        self.reference: Any = kind.from_config(config, dtype=torch.float32).eval()
        self.reference.save_pretrained(folder)
        Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
        pack_dir, index = write_pack(inspect(folder), folder / "packs", "float32", lambda *_: None)
        settings = EngineConfig(arena_bytes=index.total_bytes + (64 << 20), shm_prefix="bench")
        self._backend = CpuBackend(settings.arena_bytes)
        self.engine = Engine(settings, self._backend)
        self.engine.set_catalog([ModelSpec(MODEL, str(pack_dir))], time.monotonic())
        self.engine.load(MODEL, time.monotonic())
        while not any(m.state == "resident" for m in self.engine.status(0.0).models):
            self.engine.step(time.monotonic())
        self._next = 0

    def encode(self, inputs: Sequence[Sequence[int]]) -> float:
        """One request, until its rows are there. Seconds."""
        self._next += 1
        submit = Submit(
            request_id=str(self._next),
            attempt=1,
            tenant_id="t",
            model_id=MODEL,
            prompt_token_ids=[token for ids in inputs for token in ids],
            max_tokens=0,
            sampling=SamplingParams(),
            stop_token_ids=[],
            encode=EncodeInputs([len(ids) for ids in inputs]),
        )
        start = time.perf_counter()
        self.engine.submit(submit, time.monotonic())
        while True:
            for delta in self.engine.step(time.monotonic()):
                if delta.finish is not None:
                    if delta.finish.reason != "stop":
                        raise RuntimeError(delta.finish.error)
                    return time.perf_counter() - start

    def alone(self, inputs: Sequence[Sequence[int]]) -> float:
        """transformers' own forward, an input at a time."""
        start = time.perf_counter()
        with torch.inference_mode():
            for ids in inputs:
                self.reference(input_ids=torch.tensor([ids]))
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop its threads."""
        self.engine.close()
        self._backend.close()


def draw_inputs(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random ids."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, VOCAB) for _ in range(length)] for length in lengths]


def rates(seconds: Sequence[float], inputs: Sequence[Sequence[int]]) -> dict[str, float]:
    """The median of the repeats as rates."""
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 3),
        "inputs_per_s": round(len(inputs) / median, 1),
        "tokens_per_s": round(sum(map(len, inputs)) / median, 1),
    }


def mixed(lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Batched against one by one, in turn within each repeat."""
    inputs = draw_inputs(lengths, 1)
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), MINILM)
        ways: dict[str, Callable[[], float]] = {
            "batched": lambda: rig.encode(inputs),
            "one_by_one": lambda: sum(rig.encode([ids]) for ids in inputs),
            "alone_by_transformers": lambda: rig.alone(inputs),
        }
        rig.encode(inputs[:8])
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                taken[name].append(way())
        rig.close()
    result: dict[str, Any] = {name: rates(seconds, inputs) for name, seconds in taken.items()}
    batched = statistics.median(taken["batched"])
    result["ratio"] = round(statistics.median(taken["one_by_one"]) / batched, 2)
    result["ratio_to_transformers"] = round(
        statistics.median(taken["alone_by_transformers"]) / batched, 2
    )
    return result


def classify(lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """77 labels."""
    inputs = draw_inputs(lengths, 2)
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), BERT, num_labels=77)
        rig.encode(inputs[:8])
        seconds = [rig.encode(inputs) for _ in range(repeats)]
        rig.close()
    return {"batched": rates(seconds, inputs)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; with --out, write too."""
    parser = argparse.ArgumentParser(prog="python -m bench.encoders", description=__doc__)
    parser.add_argument("data", type=Path, help=".jsonl.gz with texts")
    parser.add_argument("--num", type=int, default=256, help="texts for the MiniLM shape")
    parser.add_argument("--num-classified", type=int, default=96, help="texts for the BERT shape")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lengths = text_lengths(options.data, options.num, 0)
    result = {
        "machine": machine.facts(),
        "texts": options.data.name,
        "step_tokens": STEP_TOKENS,
        "tokens_per_text": {
            "mean": round(statistics.mean(lengths), 1),
            "least": min(lengths),
            "most": max(lengths),
        },
        "mixed": mixed(lengths, options.repeats),
        "classify": classify(
            text_lengths(options.data, options.num_classified, 1), options.repeats
        ),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
