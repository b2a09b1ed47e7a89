"""`python -m bench.format_loss CORPORA`: what weights of eight and of four bits cost and gain.

Lives here: the loss of the demo models on text that training never saw, by format of the weights,
and the time of one model's linears. Does not: rounding (`engine/packs/quantize.py`,
`kernels/int4_blocks.py`), products (`kernels/native/bytes.h`), serving.

    loss     nats a token over windows of 512 tokens of the last 5 % of each model's text, by
             transformers' modules in float32 over what a pack's weights stand for, so that formats
             differ by nothing but themselves; perplexity is its exponential
    linears  all linears of the layers of one true shape, one after the other as in a decode step,
             each with weights of its own, so that they come from memory and not from the cache;
             formats in turn; by the C++ kernels, or torch where there are none

Formats: "dynamic" rounds what the rounded weights are multiplied with, as the C++ kernels do;
"vocabulary kept" leaves head and embedding in bfloat16; "nearest" is int4 by the plain rule (the
largest of 32 is minus eight steps) instead of the scale that loses least.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn

from bench import machine, shapes, stats
from bench.demo_data import IGNORE, held_out_rows, read_corpus
from bench.in_process import DEMO_MODELS
from engine.packs import convert
from engine.packs.blueprint import REST, layer_of
from engine.packs.pack import BLOB_NAME, INT4_SCHEME, SCALE_SUFFIX
from engine.packs.quantize import dequantize, quantize_rows, schemes_in
from engine.packs.weights import build_views
from engine.running.transformers_backend import bind_weights, build_skeleton
from kernels import int4_blocks
from kernels.int8_linear import int8_linear
from kernels.native_calls import library

# Name: the pack's dtype; whether activations are rounded; what else.
FORMATS: dict[str, tuple[convert.DtypeChoice, bool, str]] = {
    "bfloat16": ("bfloat16", False, ""),
    "int8, vocabulary kept": ("int8", False, "kept"),
    "int8": ("int8", False, ""),
    "int8 dynamic": ("int8", True, ""),
    "int4, nearest": ("int4", False, "nearest"),
    "int4": ("int4", False, ""),
    "int4 dynamic": ("int4", True, ""),
}
MODELS = ("shakespeare", "sherlock", "python")
CONTEXT = 512
BATCH = 4


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.format_loss", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("corpora", type=Path, help="folder of <model>.txt.gz")
    parser.add_argument("--rows", type=int, default=0, help="windows a model; 0: all")
    parser.add_argument("--shape", default="Qwen/Qwen2.5-0.5B", help="of the linears")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: all")
    parser.add_argument("--shapes", type=Path, default=shapes.DEFAULT_SHAPES)
    parser.add_argument("--step-rows", type=int, nargs="+", default=(1, 16, 128))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-times", action="store_true", help="losses alone")
    parser.add_argument("--output", type=Path, help="else only printed")
    return parser.parse_args(argv)


def pack_of(
    folder: Path, dest: Path, dtype: convert.DtypeChoice
) -> tuple[Path, dict[str, torch.Tensor], Mapping[str, str], int]:
    """The folder's pack: where, its tensors, which are kept how, its bytes."""
    pack_dir, index = convert.write_pack(
        convert.inspect(folder), dest, dtype, lambda phase, done, total: None
    )
    blob = torch.from_numpy(np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8))
    views = build_views(blob, index, [segment.offset for segment in index.segments], 1)
    return pack_dir, views.tensors, schemes_in(index), index.total_bytes


def exact_weights(
    kept: Mapping[str, torch.Tensor],
    schemes: Mapping[str, str],
    plain: Mapping[str, torch.Tensor],
    how: str,
) -> dict[str, torch.Tensor]:
    """What is kept stands for, in float32; `plain`: the weights in bfloat16."""
    found = {}
    for name, weight in plain.items():
        scheme = schemes.get(name, "")
        if not scheme or (how == "kept" and layer_of(name) == REST):
            found[name] = weight.float() if weight.is_floating_point() else weight
        elif scheme == INT4_SCHEME:
            blocks = int4_blocks.quantize(weight, (-8.0,)) if how == "nearest" else kept[name]
            found[name] = int4_blocks.dequantize(blocks, weight.shape[1])
        else:
            found[name] = dequantize(kept[name], kept[name + SCALE_SUFFIX])
    return found


def loss_of(
    pack_dir: Path,
    weights: dict[str, torch.Tensor],
    rounded: Sequence[str],
    rows: torch.Tensor,
) -> float:
    """Mean nats a token over `rows` [n, length + 1]; `rounded`: linears whose inputs are."""
    model = build_skeleton(pack_dir, torch.float32, "sdpa")
    bind_weights(model, weights)
    for name in rounded:
        module = model.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_round_inputs)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in torch.split(rows, BATCH):
            inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
            logits = model(input_ids=inputs, use_cache=False).logits
            total += float(
                F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
                )
            )
            count += int((targets != IGNORE).sum())
    return total / count


def _round_inputs(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    del module
    return int4_blocks.rounded_rows(inputs[0])


def losses(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """By model and format."""
    found: dict[str, Any] = {}
    for name in MODELS:
        folder = DEMO_MODELS / name
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        rows = held_out_rows(read_corpus(args.corpora, name), tokenizer, CONTEXT)
        rows = rows[: args.rows] if args.rows else rows
        found[name] = {"num_tokens": int((rows[:, 1:] != IGNORE).sum())}
        _, plain, _, _ = pack_of(folder, work_dir / "packs", "bfloat16")
        for label, (dtype, rounds, how) in FORMATS.items():
            pack_dir, kept, schemes, size = pack_of(folder, work_dir / "packs", dtype)
            weights = exact_weights(kept, schemes, plain, how)
            loss = loss_of(pack_dir, weights, list(schemes) if rounds else [], rows)
            found[name][label] = {
                "loss": loss,
                "perplexity": math.exp(loss),
                "pack_bytes": size,
            }
    return found


def products() -> dict[str, Callable[[torch.Tensor, dict[str, Any]], Any]]:
    """By format: x and a linear in every format to the product."""
    native = library()
    if native is None:
        return {
            "bfloat16": lambda x, of: F.linear(x, of["wide"]),
            "int8": lambda x, of: int8_linear(x, *of["int8"]),
            "int4": lambda x, of: int4_blocks.int4_blocks_linear(x, of["int4"]),
        }
    found: dict[str, Callable[[torch.Tensor, dict[str, Any]], Any]] = {
        "bfloat16": lambda x, of: native.linear(x, of["wide"]),
        "int8": lambda x, of: native.linear(x, of["int8"][0], scale=of["int8"][1], rounding=False),
        "int4 dynamic": lambda x, of: native.linear(x, of["int4"]),
    }
    if native.rounds_int8:
        found["int8 dynamic"] = lambda x, of: native.linear(x, of["int8"][0], scale=of["int8"][1])
    return found


def linear_times(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds for all linears of the layers, by rows and format."""
    shape = shapes.read_shapes(args.shapes)[args.shape]
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, values = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes = [(queries + 2 * values, hidden), (hidden, queries), (2 * inner, hidden)]
    sizes.append((hidden, inner))
    linears: list[dict[str, Any]] = []
    for _ in range(args.layers or shape["num_hidden_layers"]):
        for n, k in sizes:
            wide = (torch.randn(n, k) / math.sqrt(k)).to(torch.bfloat16)
            blocks = int4_blocks.quantize(wide, (-8.0,))
            linears.append({"wide": wide, "int8": quantize_rows(wide, wide.dtype), "int4": blocks})
    native = library()
    if native is not None:
        native.set_threads(args.threads)
    found: dict[str, Any] = {}
    for rows in args.step_rows:
        inputs = {k: torch.randn(rows, k).to(torch.bfloat16) for _, k in sizes}
        seconds: dict[str, list[float]] = {}
        with torch.inference_mode():
            for repeat in range(args.repeats + 1):
                for name, product in products().items():
                    start = time.perf_counter()
                    for of in linears:
                        product(inputs[of["wide"].shape[1]], of)
                    if repeat:
                        seconds.setdefault(name, []).append(time.perf_counter() - start)
        found[str(rows)] = {name: stats.repeated(times) for name, times in seconds.items()}
    return found


def table(result: dict[str, Any]) -> str:
    """Losses, then times."""
    lines = ["| model | format | loss | perplexity | against bfloat16 | pack MB |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in result["loss"].items():
        for label in FORMATS:
            figures = row[label]
            more = figures["perplexity"] / row["bfloat16"]["perplexity"] - 1
            lines.append(
                f"| {name} | {label} | {figures['loss']:.4f} | {figures['perplexity']:.3f} "
                f"| {more:+.2%} | {figures['pack_bytes'] / 1e6:.2f} |"
            )
    kind = "torch" if result["build"] is None else f"C++ for {result['build']}"
    lines.append(f"linears of {result['shape']}, {result['threads']} threads, {kind}:")
    for rows, times in result["linears"].items():
        said = [f"{label} {of['median'] * 1e3:.1f} ms" for label, of in times.items()]
        lines.append(f"  {rows:>3} rows: {', '.join(said)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write down."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    facts = machine.facts()
    native = library()
    with tempfile.TemporaryDirectory(prefix="polyhost-formats-") as folder:
        found = losses(args, Path(folder))
    result = {
        "benchmark": "formats",
        "machine": facts,
        "build": None if native is None else native.name,
        "shape": args.shape,
        "threads": args.threads,
        "loss": found,
        "linears": {} if args.without_times else linear_times(args),
    }
    print(table(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(args.output)


if __name__ == "__main__":
    main()
