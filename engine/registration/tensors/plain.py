"""A checkpoint's tensors as values, whatever its files have: what the rest of registration reads.

The tensors that stand for one quantized weight become one name of type F32, read in rows like any
other, so registering needs no more memory than for a plain checkpoint: a piece of the weight, its
scales, and where the file has it transposed its packed codes. A weight is rounded once, from
float32, to what its pack keeps. Factors of activations and of caches in eight bits are left out:
both stay as they are here, which loses less.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from engine.errors import RegistrationRefused
from engine.registration.tensors.block_formats import find_bitsandbytes, find_mxfp4
from engine.registration.tensors.column_formats import find_awq, find_gptq
from engine.registration.tensors.declared import CODE, GGUF, Declared
from engine.registration.tensors.files import (
    PIECE_BYTES,
    PLAIN_DTYPES,
    SourceTensors,
    piece_rows,
)
from engine.registration.tensors.gguf_file import GgufFile
from engine.registration.tensors.gguf_names import find_gguf
from engine.registration.tensors.row_formats import Found, find_rows
from engine.registration.tensors.scaled import Kept, Quantized, bad


class _Finder(Protocol):
    def __call__(self, files: SourceTensors, declared: Declared) -> Found: ...


FORMATS: Mapping[str, _Finder] = {
    "fp8": find_rows,
    "compressed-tensors": find_rows,
    "modelopt": find_rows,
    "gptq": find_gptq,
    "awq": find_awq,
    "mxfp4": find_mxfp4,
    "bitsandbytes": find_bitsandbytes,
}
MADE_BYTES = PIECE_BYTES >> 2
"""Of values at once: to make them takes three to four times that."""
MAX_REFUSED = 1 << 12
"""Tensors that are only wrong where the model needs them."""
MAX_MADE = 1 << 17
"""Weights of a GGUF file, which has many experts in one tensor."""
LEFT_OUT = (
    ".input_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    "_proj_activation_scale",
    ".output_global_scale",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".k_zero_point",
    ".v_scale",
    ".v_zero_point",
    ".q_scale",
    ".q_zero_point",
    ".k_global_scale",
    ".v_global_scale",
    ".q_global_scale",
    ".kv_scale",
    ".prob_scale",
)


class Tensors(Protocol):
    """Tensors by name, with types as safetensors spells them. A context manager."""

    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
        """Some rows (of the first axis) at a time."""

    def read(self, name: str) -> torch.Tensor:
        """All of it."""

    def check(self, name: str) -> None:
        """Raises RegistrationRefused for a tensor that cannot be read."""

    def kept(self, name: str) -> Kept | None:
        """How an int4 or fp8 pack keeps the codes of this weight as they are."""

    def float_dtype(self) -> str:
        """The floating type of most weights."""

    def adds_nothing(self, name: str) -> bool:
        """Whether the model is the same without this tensor."""

    def __enter__(self) -> "Tensors": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_tensors(files: list[Path], declared: Declared | None) -> Tensors:
    """The files' tensors as values. Raises RegistrationRefused."""
    if declared is not None and declared.method == GGUF:
        return _open_gguf(files[0])
    opened = SourceTensors(files)
    try:
        if declared is not None:
            return PlainTensors(opened, *_made(opened, declared), opened)
        for name, dtype in opened.dtypes.items():
            if dtype not in PLAIN_DTYPES and name not in opened.refused:
                opened.refused[name] = RegistrationRefused(
                    CODE,
                    f"tensor {name} has the type {dtype}, but config.json names no "
                    "quantization_config; download the model again, or register the unquantized "
                    "checkpoint",
                )
    except BaseException:
        opened.__exit__(None, None, None)
        raise
    return opened


def _open_gguf(path: Path) -> Tensors:
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile(path))
        made: dict[str, Quantized] = {}
        for name, quantized in find_gguf(file):
            if name in made:
                raise bad(name, "is there twice")
            if len(made) >= MAX_MADE:
                raise bad(name, f"is one of more than {MAX_MADE}")
            made[name] = quantized
        return PlainTensors(SourceTensors([]), made, set(), stack.pop_all())


def _made(files: SourceTensors, declared: Declared) -> tuple[dict[str, Quantized], set[str]]:
    """The quantized weights, and the tensors that stand for them.

    What is wrong with one goes into `files.refused`: in a tower it does not count.
    """
    made: dict[str, Quantized] = {}
    used: set[str] = set()
    for name, read in FORMATS[declared.method](files, declared):
        try:
            quantized, keys = read()
            if name in made or (name in files.shapes and name not in keys):
                raise bad(name, "is there twice")
            if not used.isdisjoint(keys):
                raise bad(min(used & keys), "belongs to two weights")
        except RegistrationRefused as refusal:
            files.refused[name] = refusal
            if len(files.refused) > MAX_REFUSED:
                raise
            continue
        made[name] = quantized
        used |= keys
    if not made and not files.refused:
        raise RegistrationRefused(
            CODE,
            f"config.json says that weights are quantized by {declared.method}, but no tensor is: "
            "if they are plain (an adapter was merged), remove quantization_config from "
            "config.json, else download the model again",
        )
    return made, used


class PlainTensors:
    """Files of quantized weights, read as float32."""

    def __init__(
        self,
        files: SourceTensors,
        made: dict[str, Quantized],
        used: set[str],
        opened: AbstractContextManager[object],
    ) -> None:
        self._files = files
        self._made = made
        self._opened = opened
        kept = [name for name in files.shapes if name not in used and not name.endswith(LEFT_OUT)]
        self.shapes = {name: files.shapes[name] for name in kept}
        self.shapes |= {name: quantized.shape for name, quantized in made.items()}
        self.dtypes = {name: files.dtypes[name] for name in kept}
        self.dtypes |= dict.fromkeys(made, "F32")
        for name in files.refused:
            self.shapes.setdefault(name, ())
            self.dtypes.setdefault(name, "F32")

    def pieces(self, name: str, max_bytes: int = MADE_BYTES) -> Iterator[torch.Tensor]:
        """Some rows (of the first axis) at a time. Raises RegistrationRefused."""
        if name not in self._made:
            yield from self._files.pieces(name, max_bytes)
            return
        shape = self.shapes[name]
        step = piece_rows(torch.Size(shape[1:]).numel() * 4, max_bytes)
        rows = self._made[name].open()
        for start in range(0, shape[0], step):
            yield rows(start, min(start + step, shape[0]))

    def read(self, name: str) -> torch.Tensor:
        """All of it; of a quantized weight in bfloat16, as it would be published."""
        if name not in self._made:
            return self._files.read(name)
        whole = torch.empty(self.shapes[name], dtype=torch.bfloat16)
        done = 0
        for piece in self.pieces(name):
            whole[done : done + len(piece)] = piece
            done += len(piece)
        return whole

    def check(self, name: str) -> None:
        """Raises RegistrationRefused for a tensor that cannot be read."""
        self._files.check(name)

    def kept(self, name: str) -> Kept | None:
        """How an int4 or fp8 pack keeps the codes of this weight as they are. Raises
        RegistrationRefused."""
        return self._made[name].kept() if name in self._made else None

    def float_dtype(self) -> str:
        """Half precision: no quantized weight has more."""
        return "BF16"

    def adds_nothing(self, name: str) -> bool:
        """Biases of zero, which some writers of GPTQ put beside every weight."""
        beside = name.removesuffix(".bias") + ".weight"
        return (
            name.endswith(".bias")
            and beside in self._made
            and self.shapes[name] == self.shapes[beside][:1]
            and not bool(self._files.read(name).any())
        )

    def __enter__(self) -> "PlainTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)
