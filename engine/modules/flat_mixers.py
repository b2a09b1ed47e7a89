"""Mixers that run flat: one pass over a step's [1, T] tokens, with kernels that know its rows.

The library's mixers call a few operations by published names: `causal_conv1d_fn` of causal-conv1d,
`chunk_gated_delta_rule` and `chunk_kda` of flash-linear-attention, `mamba_chunk_scan_combined` and
`selective_scan_fn` of mamba-ssm. Only these look beyond a token. So a mixer's own forward gives the
right result for any rows once they are exchanged for kernels over states in the arena
(`kernels/mixer_state.py`): projections, norms and gates see all tokens at once, and nothing is cut,
padded or copied.

Exchanged means: this mixer's forward is built again from the library's code with other globals. The
library's module stays as it is; nothing of the forward is written down here. Where a forward keeps
a state otherwise, the mixer is cut by rows instead (`state_mixers.py`). An option that no kernel
has raises ValueError, which the parity probe sees at registration.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.modules.state_mixers import CONV, RECURRENT, RowSplit, StepStates, cache_of, mixers
from kernels.mixer_operations import MixerOperations
from kernels.mixer_state import MixerState


def run_mixers(model: nn.Module, step: Callable[[], StepStates]) -> None:
    """Make every mixer of a skeleton run over the states of the step that is running."""
    for mixer in list(mixers(model)):
        names = exchangeable(mixer)
        mixer.forward = FlatMixer(mixer, step, names) if names else RowSplit(mixer, step)


class _Unchanged:
    """Stands for the library's cache where kernels keep the states: it has none, and takes none."""

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """As at the beginning: then a forward takes the way that sequences take."""

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """Likewise."""

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The new inputs alone: the kernel has those before them."""
        return conv_states

    def update_recurrent_state(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Written already."""
        return state

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """None that it would know of."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is rolled back."""
        return False


_CACHE = _Unchanged()


class FlatMixer:
    """The forward of one mixer with its operations exchanged: those that it calls by the names
    `exchanged`."""

    def __init__(self, mixer: Any, step: Callable[[], StepStates], exchanged: set[str]) -> None:
        self._layer: int = mixer.layer_idx
        self._step = step
        forward = inspect.unwrap(type(mixer).forward)
        self._cache = cache_of(inspect.signature(forward))
        mine = {name: getattr(self, f"_{_operation(forward, name)}") for name in exchanged}
        again = types.FunctionType(
            forward.__code__,
            {**forward.__globals__, **mine},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        again.__kwdefaults__ = forward.__kwdefaults__
        self._forward = types.MethodType(again, mixer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """hidden [1, T, H] -> as the mixer gives it."""
        kwargs[self._cache] = _CACHE
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
        return self._forward(*args, **kwargs)

    def _state(self, name: str) -> tuple[MixerOperations, MixerState]:
        step = self._step()
        return step.operations, step.state_of((self._layer, name))

    def _causal_conv1d_fn(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """x [1, channels, T] to the same."""
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"a convolution with the activation {activation!r}")
        operations, state = self._state(CONV)
        flat = _rows(x[0].T)
        # Some families keep a convolution's weights in float32.
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        out = operations.short_conv(flat, weight, bias, activation is not None, state)
        return out.T[None]

    def _chunk_gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, heads, dim] each, g and beta [1, T, v heads]; g of KDA [1, T, v heads, dim]."""
        if not use_qk_l2norm_in_kernel:
            raise ValueError("a delta rule whose queries and keys have any length")
        operations, state = self._state(RECURRENT)
        q, k, v = (_heads(tensor[0]) for tensor in (query, key, value))
        out = operations.delta_rule(q, k, v, g[0].float(), beta[0].float(), state)
        return out[None], out.new_empty(0)

    _chunk_kda = _chunk_gated_delta_rule

    def _mamba_chunk_scan_combined(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [1, T, heads, p], dt [1, T, heads], b and c [1, T, groups, n]; float32 goes out."""
        if z is not None or (D is not None and D.dim() != 1):
            raise ValueError("a scan with a gate, or with a D for each value")
        operations, state = self._state(RECURRENT)
        step = _step_sizes(dt[0], dt_bias, dt_softplus).clamp(*dt_limit)
        x, b, c = (tensor[0].float().contiguous() for tensor in (x, b, c))
        out = operations.ssd(x, step, a.float(), b, c, None if D is None else D.float(), state)
        return out[None], out.new_empty(0)

    def _selective_scan_fn(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and dt [1, inner, T], b and c [1, n, T]; float32 goes out."""
        operations, state = self._state(RECURRENT)
        step = _step_sizes(dt[0].T, delta_bias, delta_softplus)
        flat, b, c = (tensor[0].T.float().contiguous() for tensor in (x, b, c))
        skip = None if D is None else D.float()
        out = operations.selective_scan(flat, step, a.float(), b, c, skip, state)
        if z is not None:
            out = out * functional.silu(z[0].T.float())
        return out.T[None], out.new_empty(0)


_KNOWN = frozenset(
    {
        "causal_conv1d_fn",
        "chunk_gated_delta_rule",
        "chunk_kda",
        "mamba_chunk_scan_combined",
        "selective_scan_fn",
    }
)
# What a forward calls for one token of a known state, or in training: never reached here.
_OTHER_WAYS = frozenset(
    {
        "causal_conv1d_update",
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_kda",
        "selective_state_update",
        "mamba_split_conv1d_scan_combined",
        "mamba_inner_fn",
    }
)


def exchangeable(mixer: Any) -> set[str]:
    """Names in a mixer's forward of operations to exchange; empty: it keeps a state otherwise."""
    forward = inspect.unwrap(type(mixer).forward)
    found: dict[str, str] = {}
    for name in forward.__code__.co_names:
        operation = _operation(forward, name)
        if operation in _KNOWN:
            found[name] = operation
        elif operation is not None and operation not in _OTHER_WAYS:
            return set()
    if "causal_conv1d_fn" not in found.values():
        return set()
    return set(found)


def _operation(forward: Any, name: str) -> str | None:
    """The published name of what a forward calls by `name`: the library keeps it beside its own."""
    function = forward.__globals__.get(name)
    if not isinstance(function, types.FunctionType) or not hasattr(function, "__wrapped__"):
        return None
    kept: Mapping[str, Any] = inspect.getclosurevars(function).nonlocals
    published = kept.get("func_name")
    return published if isinstance(published, str) else None


def _step_sizes(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """float32, contiguous."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return (functional.softplus(dt) if softplus else dt).contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, n] whose rows have no gaps."""
    return x if x.stride(1) == 1 else x.contiguous()


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, dim] whose tokens have no gaps."""
    return x if x[0].is_contiguous() else x.contiguous()
