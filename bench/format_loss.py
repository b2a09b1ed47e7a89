"""`python -m bench.format_loss CORPORA`: what each format costs, and what hosting it adds.

The three demo models, written in each published format from the formats' definitions
(tests/engine/registration/quantized_kit.py) and registered as each dtype; the perplexity of each
pack on text that training never saw. Goes in: a folder of `<model>.txt.gz`. Comes out: for each
format its own loss (its twin, the weights that it stands for, in float32) against the plain model,
and what each dtype adds to that.

    perplexity  over windows of 512 tokens of the last 5 % of a model's text, by transformers'
                attention and the engine's own linears over the pack's own bytes: in bfloat16, and
                where a pack is quantized with rounded inputs, as requests are computed: fp8
                as GPUs compute many rows, each row rounded
    memory      with --memory instead: the most that a process that registers has in memory, by
                format and dtype, of a model of true layer shapes (`bench/format_memory.py`)

Not here: how formats are read (engine/registration/tensors), single errors (docs/packs.md).
"""

import argparse
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from bench import command, machine
from bench.demo_data import IGNORE, held_out_rows, read_corpus
from bench.format_memory import peaks
from bench.swap_load import DEMO_MODELS
from engine.modules.quantized import replace_modules
from engine.modules.transformers_backend import bind_weights, build_skeleton
from engine.pack import BLOB_NAME, schemes_in
from engine.packs.weights import build_views
from engine.registration.convert import DtypeChoice, inspect, write_pack
from kernels.fp8_linear import fp8_linear_ref
from tests.engine.registration.quantized_kit import (
    Kind,
    awq,
    compressed,
    fp8,
    gptq,
    integers,
    llm_int8,
    mxfp4,
    nf4,
    nvfp4,
    quantize_folder,
)

MODELS = ("shakespeare", "sherlock", "python")
TARGETS: tuple[DtypeChoice, ...] = ("bfloat16", "int8", "fp8", "int4")
CONTEXT = 512
BATCH = 4
# 128 does not divide the demo models' widths, so groups are of 32 here.
GROUP = 32
_INT4 = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS: dict[str, Kind] = {
    "FP8, blocks of 128": Kind(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8((128, 128), "weight_scale_inv"),
    ),
    "FP8, channels": Kind(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8((1, 0), "weight_scale"),
    ),
    "int8, channels": Kind(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        integers(0, 8, packed=False),
    ),
    "LLM.int8": Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "int4, symmetric": Kind(compressed("pack-quantized", **_INT4), integers(GROUP, 4)),
    "int4, zero points": Kind(
        compressed("pack-quantized", **_INT4, symmetric=False),
        integers(GROUP, 4, symmetric=False, fitted=True),
    ),
    "GPTQ, symmetric": Kind(
        _GPTQ | {"sym": True}, gptq(4, GROUP, first_version=True, symmetric=True)
    ),
    "GPTQ, act-order": Kind(
        _GPTQ | {"desc_act": True}, gptq(4, GROUP, first_version=True, order=True, fitted=True)
    ),
    "AWQ": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        awq(GROUP, fitted=True),
    ),
    "NVFP4": Kind(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), nvfp4(False)
    ),
    "MXFP4": Kind(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), mxfp4
    ),
    "nf4": Kind({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(True)),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.format_loss", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("corpora", type=Path, nargs="?", help="folder of <model>.txt.gz")
    parser.add_argument("--rows", type=int, default=24, help="windows a model; 0: all")
    parser.add_argument("--only", default="", help="formats with this in their names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="of registering, instead of losses")
    command.add_options(parser)
    args = parser.parse_args(argv)
    if args.corpora is None and not args.memory:
        parser.error("a folder of corpora is needed")
    return args


def perplexity(folder: Path, packs: Path, dtype: DtypeChoice, rows: torch.Tensor) -> float:
    """Of the folder's pack on rows [n, length + 1]; the pack is deleted."""
    pack_dir, index = write_pack(inspect(folder), packs, dtype, lambda *_: None)
    blob = torch.from_numpy(np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8))
    views = build_views(blob, index, [segment.offset for segment in index.segments], 1)
    model = build_skeleton(pack_dir, getattr(torch, index.dtype), "sdpa")
    with mock.patch("engine.modules.quantized.fp8_weight_linear", fp8_linear_ref):
        replace_modules(model, schemes_in(index))
    bind_weights(model, views.tensors)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in torch.split(rows, BATCH):
            inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
            logits = model(input_ids=inputs, use_cache=False).logits.to(torch.float32)
            total += float(
                functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
                )
            )
            count += int((targets != IGNORE).sum())
    shutil.rmtree(pack_dir)
    return math.exp(total / count)


def losses_of(
    name: str, kinds: Mapping[str, Kind], rows: torch.Tensor, work_dir: Path
) -> dict[str, Any]:
    """One model's perplexities: of the plain one, and by format of the twin and of each dtype."""
    packs, plain = work_dir / "packs", DEMO_MODELS / name
    found: dict[str, Any] = {"num_tokens": int((rows[:, 1:] != IGNORE).sum())}
    found["plain"] = {"float32": perplexity(plain, packs, "float32", rows)}
    found["plain"] |= {dtype: perplexity(plain, packs, dtype, rows) for dtype in TARGETS}
    for label, kind in kinds.items():
        folder, twin = work_dir / "model", work_dir / "twin"
        for copy in (folder, twin):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(plain, copy)
        quantize_folder(folder, twin, kind)
        found[label] = {"float32": perplexity(twin, packs, "float32", rows)}
        found[label] |= {dtype: perplexity(folder, packs, dtype, rows) for dtype in TARGETS}
        print(f"{name}, {label}", flush=True)
    return found


def table(models: Mapping[str, Any]) -> str:
    """A format a line: of each model in turn, against the plain one in float32 and the twin."""
    lines = [
        f"| format | itself | {' adds | '.join(TARGETS)} adds |",
        f"|---|---|{'---|' * len(TARGETS)}",
    ]
    labels = [label for label in next(iter(models.values())) if label != "num_tokens"]
    for label in labels:
        own = [model[label]["float32"] / model["plain"]["float32"] for model in models.values()]
        cells = ["-" if label == "plain" else _percent(own)]
        for dtype in TARGETS:
            more = [model[label][dtype] / model[label]["float32"] for model in models.values()]
            cells.append(_percent(more))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(ratios: Sequence[float]) -> str:
    return " ".join(f"{ratio - 1:+.2%}" for ratio in ratios)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write down."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    kinds = {label: kind for label, kind in FORMATS.items() if args.only in label}
    result: dict[str, Any] = {"benchmark": "formats", "machine": machine.facts()}
    begin = time.monotonic()
    with command.working_in(args.work_dir) as work_dir:
        if args.memory:
            result["memory"] = peaks(kinds, work_dir)
        else:
            result["perplexity"] = {}
            for name in MODELS:
                tokenizer = Tokenizer.from_file(str(DEMO_MODELS / name / "tokenizer.json"))
                rows = held_out_rows(read_corpus(args.corpora, name), tokenizer, CONTEXT)
                rows = rows[: args.rows] if args.rows else rows
                result["perplexity"][name] = losses_of(name, kinds, rows, work_dir)
            print(table(result["perplexity"]))
    result["wall_s"] = time.monotonic() - begin
    command.keep(result, args.output, "formats")


if __name__ == "__main__":
    main()
