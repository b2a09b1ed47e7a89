"""What registering a quantized checkpoint takes of memory, beside the same model in plain files.

Part of `bench.format_loss --memory`. Three layers of Llama-3.2-1B's true shapes with a small
vocabulary are written in each format, and registered by the process that registers; its largest
resident set is read while it ends. Not here: the writers (tests' quantized_kit), the perplexity.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from bench import shapes
from engine.registration.source import SINGLE_NAME
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.quantized_kit import Kind, quantize_folder

MODEL = "meta-llama/Llama-3.2-1B"
NUM_LAYERS = 3
VOCABULARY = 4096
DTYPES = ("bfloat16", "int4")
MEASURED = ("FP8, blocks of 128", "int4, symmetric", "GPTQ, act-order", "AWQ", "NVFP4", "nf4")
"""The others are read as these are."""


def peaks(kinds: Mapping[str, Kind], work_dir: Path) -> dict[str, Any]:
    """By format and dtype in bytes; "start": a process that refuses an empty folder."""
    kwargs = shapes.config_kwargs(shapes.read_shapes()[MODEL])
    kwargs |= {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCABULARY}
    (work_dir / "empty").mkdir()
    found: dict[str, Any] = {"start": registered(work_dir / "empty", work_dir / "packs", "auto")}
    for label in ("plain", *(label for label in kinds if label in MEASURED)):
        folder = work_dir / label.replace(" ", "-")
        hf_folder(folder, LlamaConfig(**kwargs))
        weights = load_file(folder / SINGLE_NAME)
        half = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        save_file(half, folder / SINGLE_NAME, metadata={"format": "pt"})
        if label != "plain":
            twin = hf_folder(work_dir / "twin", LlamaConfig(**kwargs))
            quantize_folder(folder, twin, kinds[label])
        size = (folder / SINGLE_NAME).stat().st_size
        found[label] = {"source_bytes": size}
        for dtype in DTYPES:
            found[label][dtype] = registered(folder, work_dir / "packs", dtype)
        print(label, {key: f"{value / 2**20:.0f} MiB" for key, value in found[label].items()})
    return found


def registered(folder: Path, packs: Path, dtype: str) -> int:
    """The largest resident set of the process, in bytes."""
    command = [sys.executable, "-m", "engine.registration.main", "--source", str(folder)]
    command += ["--dest", str(packs), "--dtype", dtype]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            kept = [text.split()[1] for text in status.splitlines() if text.startswith("VmHWM:")]
            peak = max([peak, *(int(number) << 10 for number in kept)])
            last = json.loads(line)
    if last["event"] != "ready" and last.get("code") != "bad_config":
        raise RuntimeError(f"{folder.name}: {last}")
    return peak
