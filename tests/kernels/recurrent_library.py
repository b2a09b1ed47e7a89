"""What transformers' own functions make of the same rows, one row at a time.

A row of one token that begins with a state goes the library's way of a decode step, others that of
a chunk. Mamba-1's scan has no way to go on from a state, so its chunks go token by token.
"""

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.kernels.recurrent_inputs import Inputs

_Result = tuple[torch.Tensor, torch.Tensor]


def library(inputs: Inputs) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """out [T, ...], and the state behind each row; None for rows without tokens."""
    rows = inputs.case.state.batch.fresh.tolist()
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor | None] = []
    for row, fresh in enumerate(rows):
        part = inputs.alone(row)
        if not len(next(value for value in part.values if value is not None)):
            states.append(None)
            continue
        first = None if fresh else inputs.case.first[row].clone()[None]
        out, state = _ROW[inputs.kernel](part, first)
        outs.append(out)
        states.append(state[0])
    return torch.cat(outs), states


def _short_conv(inputs: Inputs, first: torch.Tensor | None) -> _Result:
    x, weight, bias = inputs.values
    assert x is not None
    assert weight is not None
    silu = "silu" if inputs.flags[0] else None
    new, update, whole = x.T[None], _plain(mamba2.causal_conv1d_update), mamba2.causal_conv1d_fn
    if first is not None and len(x) == 1:
        return update(new, first, weight, bias, silu)[0].T, first
    layer = LinearAttentionLayer()
    if first is not None:
        layer.lazy_initialization(conv_states=first, conv_kernel_size=weight.shape[1])
        layer.conv_states[0].copy_(first)
        layer.has_previous_state[0] = True
    full = layer.update_conv_state(new, conv_kernel_size=weight.shape[1])
    out = _plain(whole)(full, weight, bias, silu)[0, :, -len(x) :]
    return out.T, layer.conv_states[0]


def _delta_rule(inputs: Inputs, first: torch.Tensor | None) -> _Result:
    q, k, v, g, beta = (value[None] for value in inputs.values if value is not None)
    function = qwen3_next.torch_recurrent_gated_delta_rule
    if g.dim() == 4:
        function = kimi.recurrent_kimi_delta_attention
        q, k = (one.repeat_interleave(v.shape[2] // k.shape[2], 2) for one in (q, k))
    how: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, state = _plain(function)(q, k, v, g, beta, initial_state=first, **how)
    return out[0], state


def _ssd(inputs: Inputs, first: torch.Tensor | None) -> _Result:
    x, dt, a, b, c, d = inputs.values
    assert x is not None
    assert dt is not None
    assert a is not None
    dim, size = x.shape[2], inputs.case.first.shape[-1]
    if first is not None and len(x) == 1:
        out = _plain(mamba2.mamba2_selective_state_update)(
            first,
            x,
            dt[:, :, None].expand(-1, -1, dim),
            a[:, None, None].expand(-1, dim, size),
            b,
            c,
            None if d is None else d[:, None].expand(-1, dim),
        )
        return out, first
    parts = (one[None] for one in (x, dt, b, c) if one is not None)
    x, dt, b, c = parts
    out, state = _plain(mamba2.mamba2_chunk_scan)(
        x, dt, a, b, c, 4, d, initial_states=first, return_final_states=True
    )
    return out[0], state


def _selective_scan(inputs: Inputs, first: torch.Tensor | None) -> _Result:
    x, dt, a, b, c, d = inputs.values
    assert x is not None
    assert dt is not None
    assert b is not None
    assert c is not None
    if first is None:
        parts = (one.T[None] for one in (x, dt, b, c))
        x, dt, b, c = parts
        scan = _plain(mamba.mamba_selective_scan)
        out, state = scan(x, dt, a, b, c, d, return_last_state=True)
        return out[0].T, state
    step = _plain(mamba.mamba_selective_state_update)
    outs = [
        step(first, x[t : t + 1], dt[t : t + 1], a, b[t : t + 1], c[t : t + 1], d)
        for t in range(len(x))
    ]
    return torch.cat(outs), first


def _plain(function: Any) -> Any:
    """The library's definition in torch, whatever kernels it might fetch instead."""
    return getattr(function, "__wrapped__", function)


_ROW = {
    "short_conv": _short_conv,
    "delta_rule": _delta_rule,
    "ssd": _ssd,
    "selective_scan": _selective_scan,
}
