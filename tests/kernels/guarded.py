"""Buffers that show every wrong read and write of a kernel, and kernels with an error planted.

The interpreter does not notice a load out of bounds, and a GPU notices one seldom. So every tensor
a test hands to a kernel lies between guards of poison: NaN for floats, a huge number for integers.
A read outside shows as NaN in the result; a write outside, a written input and an element of an
output that was never written show in `check`.
"""

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from triton.runtime.errors import InterpreterError

# How a planted error shows: in the result or at the guards, at an index, or where the interpreter
# computes with memory that nothing wrote.
CAUGHT = (AssertionError, IndexError, InterpreterError)
# Elements on either side: planted errors write past a buffer's end, and past the guard there is
# other people's memory. A multiple of 16 keeps buffers aligned.
GUARD = 2048
_COUNTER = itertools.count()


# Bits that no arithmetic makes: what is read (and what comes of it) is another NaN than what stands
# where a result belongs, so that a NaN written over a guard shows.
_READ = {8: 0x7FF8_0000_0000_0AAA, 4: 0x7FC0_0AAA, 2: 0x7FEA, 1: 0x7F}
_WRITTEN = {8: 0x7FF8_0000_0000_0555, 4: 0x7FC0_0555, 2: 0x7FD5, 1: -1}
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def poisoned(*shape: int, dtype: torch.dtype, is_output: bool = False) -> torch.Tensor:
    """What must never reach a result: NaN, or an integer far outside of everything."""
    size = dtype.itemsize
    if dtype.is_floating_point:
        bits = (_WRITTEN if is_output else _READ)[size]
        return torch.full(shape, bits, dtype=_WORDS[size]).view(dtype)
    if dtype == torch.bool:
        raise ValueError("a bool cannot be poisoned; use uint8")
    # Not the largest: an index computed from it must not wrap round to something small.
    return torch.full(shape, torch.iinfo(dtype).max // 2 + 1 + is_output, dtype=dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class _Held:
    """A buffer as it was handed out. `mask`: bytes that the kernel has to leave alone."""

    name: str
    flat: torch.Tensor
    before: torch.Tensor
    view: torch.Tensor
    is_output: bool
    mask: torch.Tensor


class Guards:
    """Hands out guarded tensors; `check` after the launch.

    guards = Guards()
    x = guards.input(x)                       # a copy; must not be written
    y = guards.output(3, 5, dtype=x.dtype)    # poison; every element must be written
    arena = guards.inout(arena)               # may be written anywhere inside
    launch(x, y, arena)
    guards.check()
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def input(self, tensor: torch.Tensor, row_gap: int = 0) -> torch.Tensor:
        """The same values. `row_gap`: poisoned elements behind each row of the last dimension."""
        view = self._place("input", tensor.shape, tensor.dtype, row_gap, writable=False)
        return self._fill(view, tensor)

    def inout(self, tensor: torch.Tensor, row_gap: int = 0) -> torch.Tensor:
        """The same values, and the kernel may change them."""
        view = self._place("inout", tensor.shape, tensor.dtype, row_gap, writable=True)
        return self._fill(view, tensor)

    def output(self, *shape: int, dtype: torch.dtype, row_gap: int = 0) -> torch.Tensor:
        """Poison, of which nothing may be left."""
        return self._place("output", torch.Size(shape), dtype, row_gap, writable=True)

    def check(self) -> None:
        """Raises AssertionError where a guard or an input changed or an output has a hole."""
        for held in self._held:
            changed = (_bytes(held.flat) != held.before) & held.mask
            assert not changed.any(), (
                f"{held.name}: {int(changed.sum())} bytes outside were written"
            )
            if held.is_output:
                size, holes = held.view.dtype.itemsize, torch.tensor(False)
                for is_output in (False, True):  # what was read from a guard; what stood here
                    poison = poisoned(*held.view.shape, dtype=held.view.dtype, is_output=is_output)
                    holes = holes | (_bytes(held.view) == _bytes(poison)).view(-1, size).all(-1)
                if held.view.dtype.is_floating_point:
                    holes |= held.view.contiguous().view(-1).float().isnan()
                assert not holes.any(), (
                    f"{held.name}: {int(holes.sum())} elements never written or NaN"
                )

    def are_whole(self) -> bool:
        """Whether `check` passes."""
        try:
            self.check()
        except AssertionError:
            return False
        return True

    def _fill(self, view: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        view.copy_(tensor)
        held = self._held[-1]
        self._held[-1] = _Held(
            held.name, held.flat, _bytes(held.flat).clone(), view, False, held.mask
        )
        return view

    def _place(
        self, kind: str, shape: torch.Size, dtype: torch.dtype, row_gap: int, writable: bool
    ) -> torch.Tensor:
        width = (shape[-1] if shape else 1) + row_gap
        rows = shape.numel() // max(1, shape[-1]) if shape else 1
        flat = poisoned(GUARD + rows * width + GUARD, dtype=dtype, is_output=writable)
        strides = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = width if axis == len(shape) - 2 else strides[axis + 1] * shape[axis + 1]
        mask = torch.ones(len(flat), dtype=torch.bool)
        if writable:
            mask.as_strided(shape, strides, GUARD).fill_(False)
        view = flat.as_strided(shape, strides, GUARD)
        held = _Held(
            f"{kind} {len(self._held)} {list(shape)}",
            flat,
            _bytes(flat).clone(),
            view,
            kind == "output",
            mask.repeat_interleave(dtype.itemsize),
        )
        self._held.append(held)
        return view


def planted(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """A copy of a kernel's module with `old`, which stands there exactly once, replaced by `new`.

    The copy is a file in `folder`, because Triton reads a kernel's source.
    """
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{text.count(old)} times in the source: {old!r}"
    name = f"planted_{next(_COUNTER)}_{module.__name__.replace('.', '_')}"
    path = folder / f"{name}.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy  # dataclasses look their module up
    spec.loader.exec_module(copy)
    return copy
