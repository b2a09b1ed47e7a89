"""A whole layer of Qwen3-Next by our kernels, in chunks and single tokens, beside the library's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from kernels.delta_rule import delta_rule_ref
from kernels.mixer_state import MixerState
from kernels.native_calls import library
from kernels.native_recurrent import NativeRecurrent
from kernels.short_conv import short_conv_ref
from tests.kernels.recurrent_inputs import Kernel
from tests.kernels.state_case import StateRow, error, state_case

# A prompt in two chunks, shorter and longer than the convolution, and steps before and behind.
SPANS = ((0, 5), (5, 6), (6, 8), (8, 9), (9, 11), (11, 12))
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 16, 24


def mixer() -> tuple[Any, Qwen3NextConfig]:
    """Random weights, large enough that each of them matters."""
    config = Qwen3NextConfig(
        hidden_size=64,
        linear_num_key_heads=K_HEADS,
        linear_num_value_heads=V_HEADS,
        linear_key_head_dim=K_DIM,
        linear_value_head_dim=V_DIM,
        num_hidden_layers=4,
    )
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, 0).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer, config


def by_kernels(
    layer: Any, hidden: torch.Tensor, conv: Kernel, rule: Kernel, states: list[MixerState]
) -> torch.Tensor:
    """[T, hidden] of one row's tokens: the module's forward with our two calls in it."""
    projected = layer.in_proj_qkvz(hidden[None]), layer.in_proj_ba(hidden[None])
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(*projected)
    mixed = torch.cat([part.reshape(len(hidden), -1) for part in (q, k, v)], -1)
    mixed = conv(mixed, layer.conv1d.weight.squeeze(1), None, True, states[0])
    q, k, v = torch.split(mixed, [layer.key_dim, layer.key_dim, layer.value_dim], -1)
    heads = [one.view(len(hidden), -1, K_DIM) for one in (q, k)]
    value = v.view(len(hidden), -1, V_DIM)
    g = -layer.A_log.exp() * functional.softplus(a[0] + layer.dt_bias)
    out = rule(*heads, value, g, b[0].sigmoid(), states[1])
    normed = layer.norm(out.reshape(-1, V_DIM), z.reshape(-1, V_DIM))
    result: torch.Tensor = layer.out_proj(normed.reshape(len(hidden), -1))
    return result


@pytest.mark.parametrize("by", ["definitions", "C++"])
@torch.no_grad()
def test_a_layer_is_the_librarys_step_by_step(by: str) -> None:
    conv: Kernel = short_conv_ref
    rule: Kernel = delta_rule_ref
    if by == "C++":
        native = library()
        if native is None:
            pytest.skip("no C++ compiler when this was installed, or no x86-64")
        native.set_threads(2)
        conv, rule = NativeRecurrent(native).short_conv, NativeRecurrent(native).delta_rule
    layer, config = mixer()
    cache = DynamicCache(config=config)
    x = torch.randn(SPANS[-1][1], 64, generator=torch.Generator().manual_seed(1))
    rows = [StateRow(1, fresh=True, moves=True)]
    shapes = (layer.conv_dim, 4), (V_HEADS, K_DIM, V_DIM)
    states = [state_case(shape, rows, 2).copy() for shape in shapes]
    for begin, end in SPANS:
        wanted = layer(x[None, begin:end], cache_params=cache)[0]
        starts = torch.tensor([0, end - begin])
        states = [replace(one, batch=replace(one.batch, starts=starts)) for one in states]
        assert error(by_kernels(layer, x[begin:end], conv, rule, states), wanted) <= 2e-6
        for at, one in enumerate(states):
            batch = replace(one.batch, fresh=torch.tensor([False]))
            batch = replace(batch, read_chunk=batch.write_chunk, read_slot=batch.write_slot)
            states[at] = replace(one, batch=batch)
