"""Llama 4's experts behind ours: the same values, and only the experts that were chosen."""

from typing import Any

import pytest
import torch

from engine.modules import scored_experts
from engine.modules.experts import expert_weights, experts_forward, is_experts
from engine.modules.text_part import from_config
from engine.modules.transformers_backend import bind_weights, build_skeleton
from engine.registration.parity import draw_weights, probe
from tests.engine.unusual_models import chunked_configs


def blocks(config: Any) -> tuple[Any, Any]:
    """The library's and ours, with the same weights."""
    eager = build_skeleton(config, torch.float32, "eager")
    ours = build_skeleton(config, torch.float32)
    weights = draw_weights(eager, 3)
    found = []
    for model in (eager, ours):
        bind_weights(model, weights)
        found.append(model.get_submodule("model.layers.1.feed_forward"))
    return found[0], found[1]


@pytest.mark.parametrize("aside", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_block_says_what_the_library_s_says(
    top_k: int, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = chunked_configs()["llama4"]
    config.num_experts_per_tok = top_k
    eager, ours = blocks(config)
    hidden = torch.randn(1, 7, config.hidden_size, generator=torch.Generator().manual_seed(0))
    rows: list[int] = []

    def counted(module: Any, given: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        rows.append(len(given))
        return experts_forward(module, given, *routing)

    monkeypatch.setattr(scored_experts, "experts_forward", counted)
    if not aside:
        monkeypatch.setattr(scored_experts, "_side_by_side", lambda *given: None)
    with torch.inference_mode():
        wanted, router = eager(hidden)
        got, same = ours(hidden)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(router, same)
    assert rows == ([] if aside else [7 * top_k])


def test_experts_are_side_by_side_where_it_pays() -> None:
    _, ours = blocks(chunked_configs()["llama4"])
    experts, number = ours.experts, torch.arange(40) % 4
    rows = torch.randn(40, 48, generator=torch.Generator().manual_seed(1))
    side_by_side = scored_experts._side_by_side
    with torch.inference_mode():
        found = side_by_side(experts, rows, number)
        ones = torch.ones(40, 1)
        wanted = experts_forward(experts, rows, number[:, None], ones)
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert side_by_side(experts, rows.bfloat16(), number) is None
        assert side_by_side(experts, rows, number // 2) is not None
        assert side_by_side(experts, rows, torch.zeros_like(number)) is None, "one has all rows"
        assert side_by_side(experts, rows[:0], number[:0]) is None


def test_they_are_experts_to_everything_else() -> None:
    model = from_config(chunked_configs()["llama4"])
    experts = [module for module in model.modules() if is_experts(module)]
    assert {type(module).__name__ for module in experts} == {"Llama4TextExperts"}
    assert len(expert_weights(model)) == 2 * len(experts) > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_they_come_out_right_rounded(quantization: str) -> None:
    config = chunked_configs()["llama4"]
    config.hidden_size = config.intermediate_size = 64
    assert probe(config, quantization=quantization) <= 1e-4
