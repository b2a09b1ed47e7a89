"""Both ways of a mixture's experts are their definition, whoever was chosen by how many."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import expert_mlp, expert_products, expert_rows
from kernels.expert_mlp import ExpertStack, expert_mlp_ref
from kernels.expert_products import TileShape, tile_shape
from kernels.expert_rows import RowShape, takes_pairs
from tests.kernels.guarded import CAUGHT, Guards, planted
from tests.kernels.test_expert_tiles import CHOICES, choices

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
WAYS = (expert_products, expert_rows)
CUTS: dict[str, Any] = {
    "expert_products": TileShape(16, 64, 32, 1, 1),
    "expert_rows": (RowShape(32, 32, 1), RowShape(32, 16, 1)),
}
GPT_OSS: dict[str, Any] = {
    "transposed": True,
    "interleaved": True,
    "has_bias": True,
    "limit": 1.5,
    "alpha": 1.7,
    "plus": 1.0,
}
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "gelu_tanh", "has_bias": True},
    GPT_OSS,
    {"transposed": True, "activation": "gelu"},
    {"interleaved": True},
    {"int8": True, "has_bias": True},
)


def stack_of(
    experts: int,
    h: int,
    i: int,
    dtype: torch.dtype,
    has_bias: bool = False,
    int8: bool = False,
    **how: Any,
) -> ExpertStack:
    generator = torch.Generator().manual_seed(experts + h)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    kept = []
    for n, k in ((2 * i, h), (h, i)):
        weight: torch.Tensor = (randn(experts, n, k) / k**0.5).to(dtype)
        scale = None
        if int8:
            weight = torch.randint(
                -127, 128, (experts, n, k), dtype=torch.int8, generator=generator
            )
            scale = (0.1 + torch.rand(experts, n, generator=generator)).to(dtype) / 64 / k**0.5
        if how.get("transposed"):
            weight = weight.transpose(1, 2).contiguous()
        kept.append((weight, randn(experts, n).to(dtype) if has_bias else None, scale))
    (up, up_bias, up_scale), (down, down_bias, down_scale) = kept
    return ExpertStack(
        up,
        down,
        gate_up_bias=up_bias,
        down_bias=down_bias,
        gate_up_scale=up_scale,
        down_scale=down_scale,
        **how,
    )


def guarded_stack(stack: ExpertStack, guards: Guards) -> dict[str, Any]:
    """Its fields, the tensors between guards."""
    fields = {name: getattr(stack, name) for name in ExpertStack.__slots__}
    return {
        name: guards.input(value) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }


def difference(
    kernel: ModuleType,
    ids: torch.Tensor,
    experts: int,
    dtype: torch.dtype = torch.float32,
    h: int = 48,
    i: int = 40,
    gap: int = 16,
    cut: Any = None,
    **form: Any,
) -> float:
    """The largest error, relative to the largest value; no other memory is read or changes."""
    way = "expert_products" if hasattr(kernel, "expert_products") else "expert_rows"
    generator = torch.Generator().manual_seed(len(ids))
    x = torch.randn(len(ids), h, generator=generator).to(dtype)
    weights = torch.rand(*ids.shape, generator=generator)
    weights[(ids < 0) | (ids >= experts)] = float("nan")
    stack = stack_of(experts, h, i, dtype, **form)
    wanted = expert_mlp_ref(x, ids, weights, stack).float()
    guards = Guards()
    y = guards.output(len(ids), h, dtype=dtype)
    between = [
        guards.inout(torch.full(size, float("nan"), dtype=dtype))
        for size in ((ids.numel(), i), (ids.numel(), h))
    ]
    out = (y, *between) if way == "expert_products" else (y, between[0])
    found = getattr(kernel, way)(
        guards.input(x, row_gap=gap),
        guards.input(ids),
        guards.input(weights),
        ExpertStack(**guarded_stack(stack, guards)),
        cut or CUTS[way],
        out,
    )
    guards.check()
    return float((found.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("kernel", WAYS, ids=lambda module: module.__name__)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_are_the_definition(
    dtype: torch.dtype, form: dict[str, Any], kernel: ModuleType
) -> None:
    for tokens, top_k, experts in ((1, 1, 1), (3, 2, 5)):
        ids = choices("random", tokens, top_k, experts)
        assert difference(kernel, ids, experts, dtype, **form) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", WAYS, ids=lambda module: module.__name__)
@pytest.mark.parametrize("kind", CHOICES)
def test_whoever_is_chosen(kind: str, kernel: ModuleType) -> None:
    """Experts of no token and of all, the same expert twice in a token, padding's nonsense."""
    for tokens, top_k, experts in ((1, 4, 3), (19, 2, 4)):
        assert difference(kernel, choices(kind, tokens, top_k, experts), experts) <= 3e-6


def test_any_shape_of_launch() -> None:
    ids = choices("random", 21, 2, 3)
    for cut in (TileShape(32, 32, 16, 1, 1), TileShape(64, 128, 64, 1, 1), None):
        cut = cut or tile_shape(ids.numel(), 3, torch.ones(1))
        assert difference(expert_products, ids, 3, cut=cut, **GPT_OSS) <= 3e-6
    few = choices("random", 2, 2, 3)
    for cuts in (
        (RowShape(2, 16, 1), RowShape(1, 128, 1)),
        (RowShape(64, 64, 1), RowShape(4, 8, 1)),
    ):
        assert difference(expert_rows, few, 3, h=24, i=16, cut=cuts) <= 3e-6


@pytest.mark.parametrize("kernel", WAYS, ids=lambda module: module.__name__)
def test_a_token_does_not_depend_on_the_others(kernel: ModuleType) -> None:
    """To the bit; a token of NaN (padding's may be) spoils nothing but itself."""
    name = kernel.__name__.rpartition(".")[2]
    run, cut = getattr(kernel, name), CUTS[name]
    stack = stack_of(3, 48, 40, torch.float32)
    x, weights, ids = torch.randn(5, 48), torch.rand(5, 2), choices("random", 5, 2, 3)
    alone = torch.cat(
        [run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], stack, cut) for t in range(5)]
    )
    assert torch.equal(run(x, ids, weights, stack, cut), alone)
    x[2], weights[2] = float("nan"), float("nan")
    found = run(x, ids, weights, stack, cut)
    keep = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[keep], alone[keep])
    assert found[2].isnan().all()


def share_to_the_bit(kernel: ModuleType, name: str) -> float:
    """Of results in half precision; sums are exact, so that only the roundings are left."""
    generator = torch.Generator().manual_seed(0)

    def some(*size: int) -> torch.Tensor:
        return torch.randint(-64, 65, size, generator=generator).half() / 64

    stack = ExpertStack(some(2, 64, 32), some(2, 32, 32))
    ids, weights = torch.tensor([[0, 1], [1, 0], [1, 0]]), torch.full((3, 2), 0.5)
    x = some(3, 32)
    found = getattr(kernel, name)(x, ids, weights, stack, CUTS[name])
    return float((found == expert_mlp_ref(x, ids, weights, stack)).float().mean())


@pytest.mark.parametrize("kernel", WAYS, ids=lambda module: module.__name__)
def test_half_precision_rounds_where_the_separate_operations_do(
    kernel: ModuleType, tmp_path: Path
) -> None:
    name = kernel.__name__.rpartition(".")[2]
    assert share_to_the_bit(kernel, name) > 0.97
    rounded = ["total.to(dtype).to(tl.float32), ("]
    if name == "expert_rows":
        rounded = ["out.to(dtype).to(tl.float32), (", "said.to(dtype).to(tl.float32)"]
    for old in rounded:
        bad = planted(kernel, tmp_path, old, old.replace(".to(dtype).to(tl.float32)", ""))
        assert share_to_the_bit(bad, name) < 0.9


def test_few_pairs_are_those_of_few_experts_each() -> None:
    stack = stack_of(8, 16, 16, torch.float32)
    assert takes_pairs(torch.zeros(4, 2), stack)
    assert not takes_pairs(torch.zeros(9, 1), stack)
    assert not takes_pairs(torch.zeros(0, 2), stack)
    x, weights, ids = torch.randn(4, 16), torch.rand(4, 2), choices("random", 4, 2, 8)
    exact = expert_mlp_ref(x, ids, weights, stack)
    assert torch.allclose(expert_products.expert_mlp(x, ids, weights, stack), exact, atol=1e-6)
    nobody = expert_products.expert_mlp(x[:0], ids[:0], weights[:0], stack)
    assert nobody.shape == (0, 16)


def test_tokens_take_turns_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stack_of(3, 16, 16, torch.float32)
    x, weights, ids = torch.randn(11, 16), torch.rand(11, 2), choices("random", 11, 2, 3)
    monkeypatch.setattr(expert_products, "BETWEEN_BYTES", 4 * 2 * 32 * 4)  # four tokens
    seen: list[int] = []
    products = expert_products.expert_products

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(len(x))
        return products(x, *args)

    monkeypatch.setattr(expert_products, "expert_products", counted)
    found = expert_products.expert_mlp(x, ids, weights, stack)
    assert torch.allclose(found, expert_mlp_ref(x, ids, weights, stack), atol=1e-6)
    assert seen == [4, 4, 3]


def test_what_is_refused() -> None:
    stack = stack_of(3, 48, 40, torch.float32)
    x, ids, weights = torch.randn(2, 48), choices("random", 2, 2, 3), torch.rand(2, 2)
    for bad in (
        (x[:, :40], ids, weights),
        (x, ids[:1], weights),
        (x, ids, weights[:, :1]),
        (x, ids.float(), weights),
        (x.half(), ids, weights),
        (x.repeat(1, 2)[:, ::2], ids, weights),
    ):
        with pytest.raises(ValueError, match=r"experts|choices|stride"):
            expert_products.expert_mlp(*bad, stack)


@pytest.mark.parametrize(
    ("kernel", "old", "new", "form"),
    [
        (
            expert_products,
            "source, target = pair // TOP_K, place",
            "source, target = pair, place",
            {},
        ),
        (expert_products, "source, target = place, pair", "source, target = place, place", {}),
        (expert_products, "mask=there[:, None] & real[None, :])", "mask=real[None, :])", {}),
        (expert_products, "mask=inside[:, None] & real[None, :]", "mask=real[None, :]", {}),
        (expert_products, "expert * expert_stride", "expert * 0", {}),
        (expert_products, "factor * part", "part", {}),
        (expert_products, "tl.where(known, factor", "tl.where(True, factor", {}),
        (expert_products, "rows = n * 2 if GATED else n", "rows = n", {"has_bias": True}),
        (expert_products, "row_stride\n    total", "place_stride\n    total", {"transposed": True}),
        (expert_rows, "(pair // TOP_K)", "pair", {}),
        (expert_rows, "expert * 2 * n + row", "expert * n + row", {"has_bias": True}),
        (expert_rows, "at = tl.where(known, expert, 0) * n", "at = 0 * n", {"has_bias": True}),
        (expert_rows, "later = choice + wraps", "later = choice", {}),
        (expert_rows, "(start + BLOCK_K) * (1 - wraps)", "start + BLOCK_K", {}),
        (expert_rows, "(place + BLOCK_K < k)[None, :]", "(place < k)[None, :]", {}),
        (expert_rows, "factor * said", "said", {}),
        (expert_rows, "tl.where(known, factor", "tl.where(True, factor", {"has_bias": True}),
    ],
)
def test_planted_errors_are_caught(
    kernel: ModuleType, old: str, new: str, form: dict[str, Any], tmp_path: Path
) -> None:
    bad = planted(kernel, tmp_path, old, new)
    ids = torch.tensor([[0, 3], [3, 9], [9, 0], [2, 2], [3, 0]])
    with pytest.raises(CAUGHT):
        assert difference(bad, ids, 4, h=40, **form) < 1e-3


@pytest.mark.parametrize(
    ("old", "new", "form"),
    [
        ("row += (column % 2) * n", "row += 0", {}),
        ("real = row < 2 * n", "real = row < n", {"interleaved": True}),
        ("tl.minimum(gate, limit)", "gate", GPT_OSS),
        ("tl.maximum(up, -limit)", "up", GPT_OSS),
        ("limit) + plus", "limit)", GPT_OSS),
        ("-alpha * gate", "-gate", GPT_OSS),
        ("return gate * up", "return gate + up", {}),
    ],
)
def test_planted_errors_in_what_both_share_are_caught(
    old: str, new: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = planted(expert_mlp, tmp_path, old, new)
    ids = choices("random", 3, 2, 4)
    for kernel in WAYS:
        for name in ("weight_rows", "gated"):
            monkeypatch.setattr(kernel, name, getattr(bad, name))
        with pytest.raises(CAUGHT):
            assert difference(kernel, ids, 4, **form) < 1e-3
