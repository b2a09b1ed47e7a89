"""Models and tenants of a world, by number, mix and seed.

Lives here: lists of `SimModel` and `SimTenant`. Does not: devices (devices.py), who asks for what
(casting.py: place in these lists is all that it knows).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from bench import shapes
from bench.sim.batches import rng
from bench.sim.packs import ITEM_BYTES
from bench.sim.types import SimModel, SimTenant

MIXES: dict[str, dict[str, float]] = {
    "tiny": {"HuggingFaceTB/SmolLM2-135M": 1.0},
    "small": {
        "HuggingFaceTB/SmolLM2-135M": 0.3,
        "Qwen/Qwen2.5-0.5B": 0.3,
        "Qwen/Qwen3-0.6B": 0.2,
        "google/gemma-3-1b-it": 0.1,
        "meta-llama/Llama-3.2-1B": 0.1,
    },
    "mixed": {
        "HuggingFaceTB/SmolLM2-135M": 0.1,
        "Qwen/Qwen2.5-0.5B": 0.2,
        "Qwen/Qwen3-0.6B": 0.1,
        "google/gemma-3-1b-it": 0.1,
        "meta-llama/Llama-3.2-1B": 0.2,
        "meta-llama/Llama-3.1-8B": 0.3,
    },
    "large": {"meta-llama/Llama-3.1-8B": 1.0},
}
"""Shares of shapes (names of bench/model_shapes.json)."""

WEIGHTS: dict[str, dict[float, float]] = {
    "equal": {1.0: 1.0},
    "tiers": {1.0: 0.7, 2.0: 0.2, 4.0: 0.1},
}
"""Shares of tenants by weight."""

T = TypeVar("T")


def make_models(
    number: int, seed: int = 0, mix: str | Mapping[str, float] = "mixed", dtype: str = "bfloat16"
) -> tuple[SimModel, ...]:
    """`model0`, `model1`, ...: shapes in the mix's shares to within one, their order by the seed.

    Raises ValueError on a mix or a shape that is not known.
    """
    shares = _named(MIXES, mix, "mix of models")
    unknown = sorted(set(shares) - set(shapes.read_shapes()))
    if unknown:
        raise ValueError(f"no such shape: {', '.join(unknown)}")
    drawn = _dealt(shares, number, seed, "models")
    return tuple(SimModel(f"model{place}", shape, dtype) for place, shape in enumerate(drawn))


def read_models(path: Path) -> tuple[SimModel, ...]:
    """A JSON list of {"name", "shape"} and, where they are not bfloat16 and false, "dtype" and
    "pinned". Raises ValueError that says what is wrong, OSError.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        models = tuple(SimModel(**row) for row in rows)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no list of models: {error}; write "
            '[{"name": "a", "shape": "Qwen/Qwen2.5-0.5B"}, ...]'
        ) from error
    known = shapes.read_shapes()
    for model in models:
        if model.shape not in known:
            raise ValueError(f"{path}: no shape {model.shape!r}: one of {', '.join(known)}")
        if model.dtype not in ITEM_BYTES:
            raise ValueError(f"{path}: no dtype {model.dtype!r}: one of {', '.join(ITEM_BYTES)}")
    if not models or len({model.name for model in models}) < len(models):
        raise ValueError(f"{path}: at least one model, and each with a name of its own")
    return models


def make_tenants(
    number: int, seed: int = 0, weights: str | Mapping[float, float] = "equal"
) -> tuple[SimTenant, ...]:
    """`tenant0`, `tenant1`, ...: weights in their shares to within one, their order by the seed."""
    drawn = _dealt(_named(WEIGHTS, weights, "spread of weights"), number, seed, "tenants")
    return tuple(SimTenant(f"tenant{place}", weight) for place, weight in enumerate(drawn))


def _named(
    known: Mapping[str, Mapping[T, float]], chosen: str | Mapping[T, float], what: str
) -> Mapping[T, float]:
    if not isinstance(chosen, str):
        return chosen
    if chosen not in known:
        raise ValueError(f"no {what} {chosen!r}: one of {', '.join(known)}")
    return known[chosen]


def _dealt(shares: Mapping[T, float], number: int, seed: int, what: str) -> list[T]:
    """Each kind as often as its share says (largest remainders), in random order."""
    total = sum(shares.values())
    exact = {kind: number * share / total for kind, share in shares.items()}
    counts = {kind: int(value) for kind, value in exact.items()}
    by_rest = sorted(exact, key=lambda kind: counts[kind] - exact[kind])
    for kind in by_rest[: number - sum(counts.values())]:
        counts[kind] += 1
    dealt = [kind for kind, count in counts.items() for _ in range(count)]
    return [dealt[place] for place in rng(seed, what).permutation(number)]
