"""The operations of recurrent layers, by one implementation: what a mixer's forward is given.

`MIXER_REFERENCE` are the definitions, `MIXER_KERNELS` those for a GPU; a processor's are
`native_recurrent.py`'s. Shapes are said in short_conv.py, delta_rule.py and ssd.py. All of them
read and write states where they lie in the arena, and wait for nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.delta_rule import delta_rule, delta_rule_ref
from kernels.native_calls import NativeLibrary
from kernels.native_recurrent import NativeRecurrent
from kernels.short_conv import short_conv, short_conv_ref
from kernels.ssd import selective_scan, selective_scan_ref, ssd, ssd_ref


@dataclass(frozen=True, slots=True)
class MixerOperations:
    """The calls of a recurrent layer that look beyond a token.

    short_conv       of attention's and of SSM's inputs, and of LFM's layers
    delta_rule       gated, and Kimi's
    ssd              Mamba-2's heads
    selective_scan   Mamba-1's channels
    """

    short_conv: Callable[..., torch.Tensor]
    delta_rule: Callable[..., torch.Tensor]
    ssd: Callable[..., torch.Tensor]
    selective_scan: Callable[..., torch.Tensor]


MIXER_REFERENCE = MixerOperations(short_conv_ref, delta_rule_ref, ssd_ref, selective_scan_ref)
MIXER_KERNELS = MixerOperations(short_conv, delta_rule, ssd, selective_scan)


def native_mixers(library: NativeLibrary | None) -> MixerOperations:
    """Those of a processor; the definitions where there is no library."""
    if library is None:
        return MIXER_REFERENCE
    native = NativeRecurrent(library)
    return MixerOperations(native.short_conv, native.delta_rule, native.ssd, native.selective_scan)
