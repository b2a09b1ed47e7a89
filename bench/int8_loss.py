"""`python -m bench.int8_loss CORPORA`: what int8 weights cost in quality and gain in time.

Lives here: the loss of the demo models' packs in each dtype on text that training never saw, and
the time of one model's linears at a few rows. Does not: rounding (`engine/packs/quantize.py`),
products (`kernels/int8_linear.py`), serving.

    loss     nats a token over windows of 512 tokens of the last 5 % of each model's text, computed
             from the pack by transformers' modules with the pack's own weights; perplexity is its
             exponential
    linears  all linears of the layers of one true shape, one after the other as in a decode step,
             each with weights of its own, so that they come from memory and not from the cache;
             bfloat16 and int8 in turn
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from bench import machine, shapes, stats
from bench.demo_data import IGNORE, held_out_rows, read_corpus
from bench.in_process import DEMO_MODELS
from engine.packs import convert
from engine.packs.pack import BLOB_NAME
from engine.packs.quantize import quantize_rows, replace_linears
from engine.packs.weights import build_views
from engine.running.transformers_backend import bind_weights, build_skeleton
from kernels.int8_linear import int8_linear

DTYPES: tuple[convert.DtypeChoice, ...] = ("float32", "bfloat16", "int8")
MODELS = ("shakespeare", "sherlock", "python")
CONTEXT = 512
BATCH = 4


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.int8_loss", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("corpora", type=Path, help="folder of <model>.txt.gz")
    parser.add_argument("--rows", type=int, default=0, help="windows a model; 0: all")
    parser.add_argument("--shape", default="Qwen/Qwen2.5-0.5B", help="of the linears")
    parser.add_argument("--shapes", type=Path, default=shapes.DEFAULT_SHAPES)
    parser.add_argument("--step-rows", type=int, nargs="+", default=(1, 16))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="else only printed")
    return parser.parse_args(argv)


def pack_loss(
    folder: Path, dest: Path, dtype: convert.DtypeChoice, rows: torch.Tensor
) -> tuple[float, int]:
    """Mean nats a token of a folder's pack over `rows` [n, length + 1]; and the pack's bytes."""
    pack_dir, index = convert.write_pack(
        convert.inspect(folder), dest, dtype, lambda phase, done, total: None
    )
    blob = torch.from_numpy(np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8))
    views = build_views(blob, index, [segment.offset for segment in index.segments], 1)
    model = build_skeleton(pack_dir, getattr(torch, index.dtype), "sdpa")
    replace_linears(model, [entry.name for entry in index.tensors if entry.scheme])
    bind_weights(model, views.tensors)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in torch.split(rows, BATCH):
            inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
            logits = model(input_ids=inputs, use_cache=False).logits.float()
            total += float(
                F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
                )
            )
            count += int((targets != IGNORE).sum())
    return total / count, index.total_bytes


def losses(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """By model and dtype."""
    found: dict[str, Any] = {}
    for name in MODELS:
        folder = DEMO_MODELS / name
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        rows = held_out_rows(read_corpus(args.corpora, name), tokenizer, CONTEXT)
        rows = rows[: args.rows] if args.rows else rows
        found[name] = {"num_tokens": int((rows[:, 1:] != IGNORE).sum())}
        for dtype in DTYPES:
            loss, size = pack_loss(folder, work_dir / "packs", dtype, rows)
            found[name][dtype] = {
                "loss": loss,
                "perplexity": math.exp(loss),
                "pack_bytes": size,
            }
    return found


def linear_times(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds for all linears of the layers, by rows and dtype."""
    shape = shapes.read_shapes(args.shapes)[args.shape]
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, values = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes = [(queries + 2 * values, hidden), (hidden, queries), (2 * inner, hidden)]
    sizes.append((hidden, inner))
    wide, narrow = [], []
    for _ in range(shape["num_hidden_layers"]):
        for n, k in sizes:
            wide.append((torch.randn(n, k) / math.sqrt(k)).to(torch.bfloat16))
            narrow.append(quantize_rows(wide[-1], torch.bfloat16))
    found: dict[str, Any] = {}
    for rows in args.step_rows:
        inputs = {k: torch.randn(rows, k).to(torch.bfloat16) for _, k in sizes}
        seconds: dict[str, list[float]] = {"bfloat16": [], "int8": []}
        with torch.inference_mode():
            for repeat in range(args.repeats + 1):
                start = time.perf_counter()
                for weight in wide:
                    F.linear(inputs[weight.shape[1]], weight)
                middle = time.perf_counter()
                for kept, scale in narrow:
                    int8_linear(inputs[kept.shape[1]], kept, scale)
                if repeat:
                    seconds["bfloat16"].append(middle - start)
                    seconds["int8"].append(time.perf_counter() - middle)
        found[str(rows)] = {dtype: stats.repeated(values) for dtype, values in seconds.items()}
    return found


def table(result: dict[str, Any]) -> str:
    """Losses, then times."""
    lines = [f"{'model':<13}{'dtype':<10}{'loss':>9}{'perplexity':>12}{'MB':>8}"]
    for name, row in result["loss"].items():
        for dtype in DTYPES:
            figures = row[dtype]
            lines.append(
                f"{name:<13}{dtype:<10}{figures['loss']:>9.4f}{figures['perplexity']:>12.3f}"
                f"{figures['pack_bytes'] / 1e6:>8.2f}"
            )
    lines.append(f"linears of {result['shape']}, {result['threads']} threads:")
    for rows, times in result["linears"].items():
        plain, int8 = times["bfloat16"]["median"], times["int8"]["median"]
        lines.append(
            f"  {rows:>3} rows: bfloat16 {plain * 1e3:8.1f} ms, int8 {int8 * 1e3:8.1f} ms, "
            f"{plain / int8:.2f} times as fast"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write down."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="polyhost-int8-") as folder:
        found = losses(args, Path(folder))
    print("timing linears", file=sys.stderr)
    result = {
        "benchmark": "int8",
        "machine": facts,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "shape": args.shape,
        "threads": args.threads,
        "loss": found,
        "linears": linear_times(args),
    }
    print(table(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(args.output)


if __name__ == "__main__":
    main()
