"""The C++ kernels of recurrent mixers: convolutions, the delta rule, state space models.

What they compute is said by short_conv.py, delta_rule.py and ssd.py, where the references are; the
library and its pool are native_calls.py's. States are read and written where they lie in the arena;
structures mirror native/states.h, short_conv.h, delta_rule.h and ssd.h. A row's result is the same
to the bit alone and among others, in a chunk and token by token.

Inputs are bfloat16 or float32. Rows of a step may lie a stride apart, as parts of a fused row do.
"""

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch

from kernels.delta_rule import check_delta
from kernels.mixer_state import MixerState
from kernels.native_calls import NativeLibrary
from kernels.short_conv import check_conv
from kernels.ssd import check_ssd

_TYPES = (torch.bfloat16, torch.float32)


class _States(Structure):
    """kernels/mixer_state.py MixerState, by address."""

    _fields_ = (
        ("arena", c_void_p),
        ("table", c_void_p),
        ("read_chunk", c_void_p),
        ("read_slot", c_void_p),
        ("write_chunk", c_void_p),
        ("write_slot", c_void_p),
        ("starts", c_void_p),
        ("fresh", c_void_p),
        ("num_chunks", c_int64),
        ("unit_bytes", c_int64),
        ("piece_bytes", c_int64),
        ("num_pieces", c_int32),
        ("num_rows", c_int32),
    )


class _ShortConv(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("channels", c_int32),
        ("taps", c_int32),
        ("silu", c_int32),
        ("wide", c_int32),
    )


class _DeltaRule(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "g", "beta", "out")),
        *((f"{name}_stride", c_int64) for name in ("q", "k", "v")),
        *((name, c_int32) for name in ("k_heads", "v_heads", "k_dim", "v_dim")),
        ("per_channel", c_int32),
        ("wide", c_int32),
    )


class _Ssd(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "b", "c", "dt", "a", "d", "out")),
        *((f"{name}_stride", c_int64) for name in ("x", "b", "c")),
        *((name, c_int32) for name in ("heads", "groups", "dim", "size")),
        ("selective", c_int32),
        ("wide", c_int32),
    )


class NativeRecurrent:
    """The recurrent kernels of one build. One caller at a time, as all of the library."""

    def __init__(self, native: NativeLibrary) -> None:
        self._short_conv = native.function("short_conv", POINTER(_ShortConv), POINTER(_States))
        self._delta_rule = native.function("delta_rule", POINTER(_DeltaRule), POINTER(_States))
        self._ssd = native.function("ssd", POINTER(_Ssd), POINTER(_States))

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool,
        state: MixerState,
    ) -> torch.Tensor:
        """`short_conv_ref`."""
        check_conv(x, weight, bias, state)
        out = torch.empty(x.shape, dtype=x.dtype)
        op = _ShortConv(
            x.data_ptr(),
            weight.data_ptr(),
            _address(bias),
            out.data_ptr(),
            x.stride(0),
            *weight.shape,
            silu,
            _is_wide(x),
        )
        self._short_conv(byref(op), byref(_states(state)))
        return out

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: MixerState,
    ) -> torch.Tensor:
        """`delta_rule_ref`; with g [T, v heads, dk] Kimi's."""
        check_delta(q, k, v, g, beta, state)
        out = torch.empty(v.shape, dtype=v.dtype)
        g, beta = _floats(g), _floats(beta)
        op = _DeltaRule(
            *(tensor.data_ptr() for tensor in (q, k, v, g, beta, out)),
            *(tensor.stride(0) for tensor in (q, k, v)),
            k.shape[1],
            v.shape[1],
            k.shape[2],
            v.shape[2],
            g.dim() == 3,
            _is_wide(v),
        )
        self._delta_rule(byref(op), byref(_states(state)))
        return out

    def ssd(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        state: MixerState,
    ) -> torch.Tensor:
        """`ssd_ref`."""
        check_ssd(x, dt, a, b, c, d, state)
        out = torch.empty(x.shape, dtype=x.dtype)
        dt, a, d = _floats(dt), _floats(a), None if d is None else _floats(d)
        op = _Ssd(
            *(_address(tensor) for tensor in (x, b, c, dt, a, d, out)),
            *(tensor.stride(0) for tensor in (x, b, c)),
            x.shape[1],
            b.shape[1],
            x.shape[2],
            b.shape[2],
            a.dim() == 2,
            _is_wide(x),
        )
        self._ssd(byref(op), byref(_states(state)))
        return out

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        state: MixerState,
    ) -> torch.Tensor:
        """`selective_scan_ref`."""
        return self.ssd(x[:, :, None], dt, a, b[:, None], c[:, None], d, state)[:, :, 0]


def _states(state: MixerState) -> _States:
    batch, geometry = state.batch, state.geometry
    fields = (
        batch.read_chunk,
        batch.read_slot,
        batch.write_chunk,
        batch.write_slot,
        batch.starts,
        batch.fresh,
    )
    return _States(
        state.arena.data_ptr(),
        state.table.data_ptr(),
        *(tensor.data_ptr() for tensor in fields),
        state.table.stride(0),
        geometry.unit_bytes,
        geometry.piece_units * geometry.unit_bytes,
        geometry.num_pieces,
        state.num_rows,
    )


def _is_wide(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in _TYPES:
        raise ValueError(f"inputs are bfloat16 or float32, not {tensor.dtype}")
    return tensor.dtype == torch.float32


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    """Small tensors as the kernels want them."""
    return tensor.float().contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
