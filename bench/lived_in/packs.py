"""Packs of the hosted models, small enough for any machine: the demo models, two larger ones with
random weights, an encoder. Converted by the product's own registration, in this process.
"""

import io
import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.lived_in.world import HOSTED
from engine.registration import main as registration
from registry.models.catalog import NEXT, PackFacts
from tests.e2e.folders import DEMO_MODELS, write_embed

# Layers and width: what does not fit on a small device beside all others.
RANDOM = {
    "atlas-instruct": (12, 384),
    "borealis/chat-with-a-rather-long-name-v2.1": (8, 320),
}


def write_packs(work_dir: Path, packs_dir: Path) -> dict[str, PackFacts]:
    """By model, as the catalog wants them; "python@next" is python's second revision."""
    sources: dict[str, tuple[Path, str]] = {}
    for number, name in enumerate(HOSTED):
        folder = work_dir / f"source-{number}"
        if name in RANDOM:
            _write_random(folder, *RANDOM[name], seed=number)
        elif name == "minilm-embed":
            write_embed(folder)
        else:
            folder = DEMO_MODELS / name
        sources[name] = (folder, "float32" if name == "python" else "auto")
    sources[f"python{NEXT}"] = (DEMO_MODELS / "python", "auto")
    return {name: _convert(*source, packs_dir) for name, source in sources.items()}


def _write_random(folder: Path, num_layers: int, width: int, seed: int) -> None:
    """A demo model's files around larger weights."""
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(DEMO_MODELS / "sherlock", folder, ignore=ignored)
    config = Qwen3Config.from_pretrained(folder)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = (
        num_layers,
        width,
        3 * width,
    )
    config.layer_types = ["full_attention"] * num_layers
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _convert(folder: Path, dtype: str, packs_dir: Path) -> PackFacts:
    out = io.StringIO()
    arguments = ["--source", str(folder), "--dest", str(packs_dir), "--dtype", dtype]
    if registration.main(arguments, out):
        raise SystemExit(f"{folder} could not be registered:\n{out.getvalue()}")
    done = json.loads(out.getvalue().splitlines()[-1])
    return PackFacts(
        **{name: done[name] for name in PackFacts.__dataclass_fields__ if name != "pack"},
        pack=Path(done["pack_dir"]).name,
    )
