"""Drawing by kernels: the definition's token, and the engine's, for every kind of row."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.protocol import SamplingParams
from engine.request import SampleInput, SamplingState, uniforms
from engine.sampling import sampler
from engine.sampling.sampling_batch import build_sampling
from kernels import sampling as module
from kernels import tail_cut
from kernels.sampling import Draw, draw_of, draw_ref
from tests.kernels.guarded import CAUGHT, Guards, planted

VOCAB = 8300  # three splits, two of rows that cut, ragged
KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 3.0, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 7, "top_p": 0.5},
    {"top_p": 0.99, "temperature": 5.0},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 0.3, "top_k": 3, "top_p": 0.7},
    {"top_k": 6000, "top_p": 0.2},
    {"temperature": 1e-30, "top_p": 0.5},
)

# Where equals matter.
TIED = (KINDS[0], KINDS[5], KINDS[6], KINDS[10])


def parameters(kinds: tuple[dict[str, float], ...], position: int) -> list[SamplingParams]:
    """Seeds differ by row."""
    filled = [{"temperature": 1.0} | kind for kind in kinds]
    return [
        SamplingParams(
            temperature=kind["temperature"],
            top_p=kind.get("top_p", 1.0),
            top_k=int(kind.get("top_k", 0)),
            min_p=kind.get("min_p", 0.0),
            seed=31 * position + row,
        )
        for row, kind in enumerate(filled)
    ]


def drawn_how(params: list[SamplingParams], position: int) -> Draw:
    """As the engine's own numbers say for tokens at this position."""
    return draw_of(
        [p.temperature for p in params],
        uniforms([p.seed for p in params], [position] * len(params)).tolist(),
        [p.min_p for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
    )


def logits_of(rows: int, seed: int, ties: bool) -> torch.Tensor:
    values = 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return (values * 2).round() / 2 if ties else values


def guarded_draw(
    kernel: ModuleType, logits: torch.Tensor, how: Draw
) -> tuple[torch.Tensor, torch.Tensor]:
    guards = Guards()
    held = Draw(*(guards.input(getattr(how, name)) for name in Draw.__dataclass_fields__))
    out: tuple[torch.Tensor, torch.Tensor] = kernel.draw(guards.input(logits, row_gap=9), held)
    guards.check()
    return out


@pytest.mark.parametrize("ties", [False, True])
def test_kernels_draw_the_definitions_and_the_engines_tokens(ties: bool) -> None:
    position = 4 if ties else 3
    params = parameters(TIED if ties else KINDS, position)
    logits = logits_of(len(params), position, ties)
    how = drawn_how(params, position)
    tokens, broken = guarded_draw(module, logits, how)
    assert not broken.any()
    assert tokens.tolist() == draw_ref(logits, how)[0].tolist()
    rows = [SampleInput(SamplingState(p, [0] * position), ()) for p in params]
    batch = build_sampling(rows, torch.device("cpu"))
    assert tokens.tolist() == sampler.sample(logits.clone(), batch).token_ids.tolist()


def test_flat_and_masked_rows() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1] = float("-inf")
    logits[1, [7, VOCAB - 1]] = 1.0
    logits[3, 5:] = float("-inf")
    kinds: tuple[dict[str, float], ...] = (
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.25},
        {"temperature": 2.0, "top_k": 2},
    )
    params = parameters(kinds, 9)
    how = drawn_how(params, 9)
    tokens, _ = guarded_draw(module, logits, how)
    assert tokens.tolist() == draw_ref(logits, how)[0].tolist()
    assert tokens[0] < 3
    assert tokens[1] == 7
    assert tokens[3] < 2


CUTS: tuple[dict[str, float], ...] = (
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95},
    {"top_p": 0.95},
    {"top_p": 1e-9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 0.3, "top_k": 7, "top_p": 0.5},
    {"temperature": 0.05, "top_k": 20},
    {"temperature": 5.0, "top_p": 0.9},
    {"top_k": 3000, "top_p": 0.3},
)
ADVERSE: dict[str, Callable[[int], torch.Tensor]] = {
    "equal": torch.zeros,
    "one peak": lambda size: torch.zeros(size).index_fill_(0, torch.tensor(size // 2), 60.0),
    "denormal weights": lambda size: torch.linspace(0, -140, size),
    "all but two masked": lambda size: torch.full((size,), -torch.inf).index_fill_(
        0, torch.tensor([size // 3, size - 1]), 1.0
    ),
    "few values": lambda size: (torch.arange(size) * 7919 % 5).float(),
    "octaves": lambda size: -(torch.arange(size) * 7919 % 70) * math.log(2) / 2,
}


@pytest.mark.parametrize("name", ADVERSE)
@pytest.mark.parametrize("size", [1, 37, 8195])
def test_adverse_rows(name: str, size: int) -> None:
    logits = ADVERSE[name](size).repeat(len(CUTS), 1)
    how = drawn_how(parameters(CUTS, 5), 5)
    tokens, broken = guarded_draw(module, logits, how)
    assert not broken.any()
    assert tokens.tolist() == draw_ref(logits, how)[0].tolist()


@pytest.mark.parametrize("size", [151_936, 262_144])
def test_large_vocabularies(size: int) -> None:
    """Peaked as a language model's, and tied at the boundaries."""
    uniform = torch.rand(2, size, generator=torch.Generator().manual_seed(size))
    logits = 2 * uniform.clamp(1e-6, 1 - 1e-6).logit()
    logits[1] = (logits[1] * 2).round() / 2
    kinds = ({"top_k": 20, "top_p": 0.95}, {"top_p": 0.9})
    how = drawn_how(parameters(kinds, 5), 5)
    assert module.draw(logits, how)[0].tolist() == draw_ref(logits, how)[0].tolist()


def test_numbers_at_the_ends_of_their_range() -> None:
    logits = logits_of(4, 0, ties=False)
    numbers = [2.0**-54, 1 - 2.0**-53] * 2
    how = draw_of([1.0] * 4, numbers, [0.0] * 4, [0, 0, 50, 50], [1.0, 1.0, 0.9, 0.9])
    tokens, _ = guarded_draw(module, logits, how)
    assert tokens[:2].tolist() == [0, VOCAB - 1]
    kept = logits[2:].topk(50).indices.sort().values
    assert tokens[2] >= kept[0, 0]
    assert int(tokens[3]) in kept[1].tolist()


def test_a_temperature_under_float32_is_the_coldest() -> None:
    """Not greedy with a tail cut off by what was never computed."""
    logits = logits_of(2, 2, ties=False)
    how = draw_of([1e-50] * 2, [0.5] * 2, [0.0] * 2, [40, 0], [1.0, 0.5])
    tokens, _ = guarded_draw(module, logits, how)
    assert tokens.tolist() == draw_ref(logits, how)[0].tolist() == logits.argmax(-1).tolist()


def test_broken_rows() -> None:
    logits = logits_of(5, 1, ties=False)
    logits[0, 4321], logits[1, 17], logits[2] = float("nan"), float("inf"), float("-inf")
    how = draw_of([1.0, 0.0, 1.0, 1.0, 0.0], [0.5] * 5, [0.0] * 5, [3, 0, 0, 4, 0], [0.9] * 5)
    tokens, broken = guarded_draw(module, logits, how)
    assert broken.tolist() == [True, True, True, False, False]
    assert broken.tolist() == draw_ref(logits, how)[1].tolist()
    assert tokens[:3].tolist() == [0, 0, 0]
    assert not module.draw(logits[:0], draw_of([], [], [], [], []))[0].numel()


GREEDY = {"temperature": 0.0}
FLAT = {"temperature": 4.0, "top_k": 7, "top_p": 0.4}
PLANTED: tuple[tuple[str, str, dict[str, float]], ...] = (
    (
        "token = tl.min(tl.where(peak_of == peak,",
        "token = tl.max(tl.where(peak_of == peak,",
        GREEDY,
    ),
    ("other=0.0) * tl.exp((peak_of - peak) / hot)", "other=0.0)", {}),
    ("first = chosen * SPLIT", "first = 0 * chosen", {}),
    ("weight < floor", "weight < 0.0", {"min_p": 0.3}),
    ("limit = tl.minimum(limit, size)", "limit = tl.minimum(limit + 1, size)", {"top_k": 1}),
    ("(rank <= room)", "(rank < room)", {"top_k": 2}),
    ("total >= wanted", "total >= 0.5 * wanted", FLAT | {"top_p": 0.8}),
    ("start + tl.sum((inner <= target)", "start + 1 + tl.sum((inner <= target)", {"top_k": 7}),
    ("share * whole, 1e-300", "share * tl.sum(mass, 0), 1e-300", FLAT),
    ("weight = tl.exp((value - peak) / hot)", "weight = tl.exp(value - peak)", {"top_k": 300}),
    ("tl.cumsum(total, 0) < limit)", "tl.cumsum(total, 0) < limit // 50)", {"top_k": 300}),
    ("(1 - share) * everything", "(2 - share) * everything", {"top_p": 0.5}),
    ("other < mine", "other <= mine", {"top_k": 300}),
    ("before += tl.sum(", "before += 0 * tl.sum(", {"top_k": 300}),
)


@pytest.mark.parametrize(("old", "new", "kind"), PLANTED)
def test_planted_errors_are_caught(
    old: str, new: str, kind: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = module
    if old in Path(tail_cut.__file__).read_text(encoding="utf-8"):
        monkeypatch.setattr(module, "cut_tail", planted(tail_cut, tmp_path, old, new).cut_tail)
    else:
        bad = planted(module, tmp_path, old, new)
    rows = ({"temperature": 0.5} | kind,) * 4 if kind else ({},) * 30
    how = drawn_how(parameters(rows, 3), 3)
    logits = logits_of(len(rows), 3, ties=kind == GREEDY or "(rank" in old)
    with pytest.raises(CAUGHT):
        assert guarded_draw(bad, logits, how)[0].tolist() == draw_ref(logits, how)[0].tolist()
