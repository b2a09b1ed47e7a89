"""What others reach on the same GPU: transformers' own `generate`, where nothing else is installed.

Peers are measured where they can be imported and named where they cannot; nothing is fetched.
"""

import importlib.util
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench import gpu_models, shapes
from bench.gpu_rig import Settings

OTHERS = ("vllm", "sglang", "tensorrt_llm", "lmdeploy")
SHAPES = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B")
BATCHES = (1, 8)


def peers(settings: Settings) -> dict[str, Any]:
    """Decode tokens a second by shape and batch; and who is not there."""
    found: dict[str, Any] = {
        "not installed": [name for name in OTHERS if importlib.util.find_spec(name) is None]
    }
    for name in SHAPES[:1] if settings.dry else SHAPES:
        shape = gpu_models.shape_of(name, settings.dry)
        config = AutoConfig.for_model(shape["model_type"], **shapes.config_kwargs(shape))
        with torch.device("cpu" if settings.dry else "cuda"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        found[f"transformers generate, {name}"] = {
            f"batch {batch}": _generate(model, batch, settings) for batch in BATCHES
        }
        del model
    return found


def _generate(model: Any, batch: int, settings: Settings) -> float:
    """Tokens a second of decoding: two runs of unlike length, their difference."""
    device = next(model.parameters()).device
    ids = torch.randint(64, (batch, settings.scaled(128, 4)), device=device)
    short, long = settings.scaled(8, 2), settings.scaled(72, 4)
    seconds = []
    for new in (short, short, long):
        begin = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        out.sum().item()
        seconds.append(time.perf_counter() - begin)
    return batch * (long - short) / max(1e-9, seconds[2] - seconds[1])
