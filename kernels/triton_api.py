"""Triton for the kernels, where it is installed; otherwise stand-ins, so that every module imports.

The core install has no Triton (a gigabyte that a processor has no use for). Modules with kernels
take `jit`, `tl` and `triton` from here and from nowhere else. Without Triton a kernel is an object
that raises `TritonMissing` when it is launched, and its references work as ever.

With `TRITON_INTERPRET=1` in the environment *before triton is imported*, kernels are interpreted
on CPU tensors: slow, exact in float32, and WRONG in bfloat16 arithmetic. A kernel therefore widens
before it computes, or has a constexpr for the dtype of its products.

A kernel's module ends with `DECLARED`: the configurations it is launched with in earnest, which
`kernels.aot` compiles for every architecture without a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = None

__all__ = [
    "ARCHS",
    "HAS_TRITON",
    "Declared",
    "TritonMissing",
    "cdiv",
    "check_out",
    "check_rows",
    "jit",
    "next_power_of_2",
    "tl",
]

HAS_TRITON = triton is not None

# Ampere, Hopper, Blackwell: what every configuration is compiled for unless it says otherwise.
ARCHS = (80, 90, 100)


class TritonMissing(RuntimeError):
    """A Triton kernel was launched where Triton is not installed."""


class _Missing:
    """Stands where a compiled kernel would."""

    def __init__(self, function: Any) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> NoReturn:
        raise TritonMissing(f"{self.__name__} needs Triton: install the extra `cuda`")


class _Constant:
    """`tl.constexpr` where there is no Triton; also what arguments are annotated with."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Language:
    """As much of `triton.language` as a module uses outside of its kernels."""

    constexpr = _Constant
    tensor = _Constant


if triton is None:
    tl = _Language()


def jit(function: Any) -> Any:
    """`triton.jit`, or an object that raises when launched."""
    return _Missing(function) if triton is None else triton.jit(function)


@dataclass(frozen=True, slots=True)
class Declared:
    """A configuration that a kernel is launched with in earnest.

    name        unique over all kernels, `kernel/what is special`
    kernel      what `jit` returned
    signature   every argument that is not a constexpr, in the kernel's order: "i32", "i64", "fp32",
                "*bf16", "*fp8e4nv"...; ":16" behind it where launches pass a multiple of 16
                (pointers: an address), which is what wide loads need
    constexprs  every constexpr without a default, by name
    archs       compute capabilities that have the types used
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    archs: tuple[int, ...] = ARCHS


def check_rows(*rows: torch.Tensor) -> None:
    """Raises ValueError where elements of a row do not lie side by side: no kernel would notice."""
    if any(tensor.shape[-1] > 1 and tensor.stride(-1) != 1 for tensor in rows):
        raise ValueError("the last stride is 1")


def check_out(*outs: torch.Tensor) -> None:
    """Raises ValueError where what a kernel writes is not contiguous."""
    if not all(out.is_contiguous() for out in outs):
        raise ValueError("out is contiguous")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1: sizes of Triton's blocks are powers of two."""
    return 1 << (n - 1).bit_length()
