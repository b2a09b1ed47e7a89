"""Dependent launches: a kernel is started while the one before it in the stream drains (Hopper on).

Without them a GPU idles for a microsecond or two between two kernels: it starts the second when the
last block of the first has ended. A dependent launch may start as soon as every block of the one
before it has called `launch_dependents`; nothing that the one before writes is to be seen until
`wait` returns, which is when that one has ended and its writes are visible. CUDA's name is
programmatic dependent launch; captures keep it.

    enter(DEPENDENT)        first thing in a kernel: lets the next start, waits for the one before
    **dependent(device)     the constant and the option of a launch

Every block of such a kernel waits, and waits before it reads what a step computes and before it
writes anything. So when one has ended, all launches before it have, and memory may be used again in
the order of the stream, as ever. What is read before the wait (weights, in few_rows.py) must not
be written by dependent launches: weights are moved and loaded by ordinary ones and by copies.

`DEPENDENT_LAUNCH = False` turns it off. On an H200 the products of a layer of 8B take 113 us with
it and 119 without (bench/few_rows.py).
"""

from functools import lru_cache

import torch

from kernels.prefill_shape import HOPPER, capability
from kernels.triton_api import HAS_TRITON, jit, tl

DEPENDENT_LAUNCH = True


@lru_cache
def can_depend(device: torch.device) -> bool:
    """Whether the device and Triton have it."""
    known = HAS_TRITON and hasattr(tl.extra.cuda, "gdc_wait")
    return known and device.type == "cuda" and capability(device) >= HOPPER


def dependent(device: torch.device) -> dict[str, bool]:
    """What a launch on the device is given, beside its other arguments."""
    if DEPENDENT_LAUNCH and can_depend(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@jit
def enter(DEPENDENT: tl.constexpr) -> None:
    """Let the next launch start, and wait for the one before."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
