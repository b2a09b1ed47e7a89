"""Experts on a device: the operation is given what the modules compute with, or the modules run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.modules.experts import (
    EXPERTS_NAME,
    as_linears,
    keep_rounded,
    register_experts,
    use_operation,
)
from engine.pack import SCALE_SUFFIX
from engine.registration.convert import inspect, write_pack
from engine.registration.quantize import quantize_stack
from kernels.expert_mlp import ExpertStack, expert_mlp_ref
from kernels.int4_blocks import INT4_BLOCKS
from tests.engine.running.test_fusion import EXPERTS, WIDE, Run, ask, prompts
from tests.engine.tiny_models import TinyModel, save_folder

NARROW: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralExperts, MixtralConfig, {"num_local_experts": 5}),
    "gelu": (MixtralExperts, MixtralConfig, {"num_local_experts": 5, "hidden_act": "gelu"}),
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig, {"num_experts": 5}),
    "olmoe": (OlmoeExperts, OlmoeConfig, {"num_experts": 5}),
    "glm4_moe": (Glm4MoeExperts, Glm4MoeConfig, {"n_routed_experts": 5}),
    "gpt_oss": (GptOssExperts, GptOssConfig, {"num_local_experts": 5}),
}


def experts_of(kind: str) -> Any:
    made, config, options = KINDS[kind]
    torch.manual_seed(3)
    experts = made(config(**NARROW, **options))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    return experts


def chosen() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(7)])
    return torch.randn(7, 64), ids, torch.rand(7, 2)


def run(experts: Any, name: str, *given: torch.Tensor) -> torch.Tensor:
    register_experts()
    experts.config._experts_implementation = name
    with torch.inference_mode():
        found: torch.Tensor = experts(*given)
    return found


def counted(calls: list[ExpertStack]) -> Any:
    def operation(*given: Any) -> torch.Tensor:
        calls.append(given[-1])
        return expert_mlp_ref(*given)

    return operation


@pytest.mark.parametrize("kind", KINDS)
def test_the_operation_is_the_modules_own(kind: str) -> None:
    experts, calls = experts_of(kind), list[ExpertStack]()
    given = chosen()
    wanted = run(experts, "eager", *given)
    assert use_operation(nn.ModuleList([experts]), counted(calls))
    found = run(experts, EXPERTS_NAME, *given)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_rounded_experts_too(kind: str) -> None:
    """int8, whichever way round the library has them; int4 stays torch's."""
    given, said = chosen(), {}
    for scheme in ("int8", INT4_BLOCKS):
        for by_operation in (False, True):
            experts, calls = experts_of(kind), list[ExpertStack]()
            model = nn.ModuleDict({"experts": experts})
            for leaf in ("gate_up_proj", "down_proj"):
                stack = as_linears(model, f"experts.{leaf}", experts.get_parameter(leaf)).detach()
                kept, scale = quantize_stack(stack, scheme, torch.float32)
                keep_rounded(experts, leaf, scheme)
                for name, values in ((leaf, kept), (leaf + SCALE_SUFFIX, scale)):
                    if values is not None and hasattr(experts, name):
                        fixed = nn.Parameter(values, requires_grad=False)
                        experts.register_parameter(name, fixed)
            if by_operation:
                assert use_operation(model, counted(calls)) == (scheme == "int8")
            said[scheme, by_operation] = run(experts, EXPERTS_NAME, *given)
            assert len(calls) == (by_operation and scheme == "int8")
        assert torch.allclose(said[scheme, False], said[scheme, True], atol=1e-4)


def test_experts_without_a_gate_are_the_librarys() -> None:
    experts: Any = NemotronHExperts(
        NemotronHConfig(**NARROW, n_routed_experts=5, moe_latent_size=None)
    )
    assert not use_operation(nn.ModuleList([experts]), counted([]))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    given = chosen()
    wanted = run(experts, "eager", *given)
    assert torch.allclose(run(experts, EXPERTS_NAME, *given), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_packs_of_rounded_experts(tmp_path: Path, dtype: Any) -> None:
    """int8 runs fused and is recorded; int4 waits for the choice, and nothing of it is recorded."""
    folder = tmp_path / "source"
    config = Qwen3MoeConfig(**WIDE | {"hidden_size": 128}, **EXPERTS, head_dim=32)
    save_folder(config, folder, 5)
    pack_dir, _ = write_pack(inspect(folder), tmp_path / "packs", dtype, lambda *_: None)
    made = Run([TinyModel("m", folder, pack_dir, None)])
    for _ in range(2):
        made.say([ask(i, "m", prompt, 6) for i, prompt in enumerate(prompts(3))])
    graphs, fused = made.opened.graphs, made.runner("m").fused
    assert graphs is not None
    assert (fused is not None) == (dtype == "int8")
    assert (graphs.counters["graph_replays"] > 0) == (dtype == "int8")
    assert not graphs.counters["graphs_refused"]
    made.close()
