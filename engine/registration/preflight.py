"""What a model is and what a registration will take, before anything large is fetched or written.

From the configuration, the files' sizes and the disk: family, class and task, bytes of the weights
as hosted, bytes still to fetch, bytes the pack will take; for each dtype what weights and KV would
take and what rounding the weights to it adds; against the disk's free space, the operator's quota
for packs and downloads together, and the worker's arena where its size is known. Reads sizes,
changes nothing. Estimates of the pack are within its alignment; where "auto" has to guess the
checkpoint's type (a configuration that does not say), the size of the files decides.
"""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import RegistrationRefused
from engine.modules.experts import expert_weights, linear_shape
from engine.registration.blueprint import Blueprint
from engine.registration.encoder_blueprint import plan_model
from engine.registration.numbers import check_numbers
from engine.registration.quantize import QUANTIZATIONS, kept_bytes, schemes_of
from engine.registration.source import check_tokenizer, load_config
from engine.registration.tensors import Declared
from kernels.int4_blocks import E2M1, E2M1_HALVES, FP4, INT4_BLOCKS, IQ4, NF4, ZEROS

DISK_MARGIN_BYTES = 64 << 20
"""Free space that a registration leaves to the database, the logs and everybody else."""

KV_TOKENS = 1000
"""Of the sequence whose KV is reported."""

_TARGETS = ("bfloat16", "int8", "fp8", "int4")
# The same of checkpoints that are not quantized, by what they are in.
_PLAIN_ERRORS = {
    "float32": {"float32": 0.0, "bfloat16": 0.0017, "int8": 0.009, "fp8": 0.026, "int4": 0.082},
    "bfloat16": {"bfloat16": 0.0, "int8": 0.009, "fp8": 0.026, "int4": 0.082},
}
# What rounding once more adds, by how a checkpoint is quantized: measured on synthetic weights
# (docs/packs.md).
_ADDED_ERRORS: dict[str, tuple[float, ...]] = {
    "fp8": (0.0017, 0.014, 0.028, 0.088),
    "gptq": (0.0017, 0.012, 0.027, 0.044),
    "awq": (0.0017, 0.013, 0.027, 0.044),
    "mxfp4": (0.0, 0.011, 0.033, 0.049),
    "compressed-tensors": (0.002, 0.014, 0.028, 0.087),
    "modelopt": (0.002, 0.014, 0.028, 0.088),
    "bitsandbytes": (0.002, 0.013, 0.026, 0.085),
    "gguf": (0.0017, 0.013, 0.027, 0.085),
}
# The same of int4 where a pack has a form that keeps the codes.
_KEPT_ERRORS = {
    INT4_BLOCKS: 0.0017,
    ZEROS: 0.003,
    E2M1: 0.0,
    E2M1_HALVES: 0.0017,
    NF4: 0.009,
    FP4: 0.006,
    IQ4: 0.008,
}


@dataclass(frozen=True, slots=True)
class Room:
    """What there is. 0: no bound, or not known.

    folders      whose bytes count against `quota_bytes`
    arena_bytes  of the worker
    """

    folders: tuple[Path, ...] = ()
    quota_bytes: int = 0
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostingChoice:
    """What hosting a checkpoint in `dtype` takes.

    added_error   root mean square of what this rounding adds, over that of the weights
    kv_bytes      of a sequence of KV_TOKENS tokens; layers with a window keep no more than that
    fits          whether both fit into the worker's arena; None: its size is not known
    """

    dtype: str
    weight_bytes: int
    added_error: float
    kv_bytes: int = 0
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class Preflight:
    """The figures, in bytes: what is still to come, and what there is.

    architecture    the class that runs
    wrapper         the multimodal type whose text part is hosted; "" where there is none
    hosted_as       of a wrapper: "text class" or "flat wrapper" (docs/packs.md); else ""
    num_parameters  of what is hosted: a wrapper's towers do not count
    dtype           what the figures are of: what was asked for, or what "auto" takes
    source_format   how the checkpoint is quantized, "" where it is not
    choices         in which dtypes it can be hosted
    """

    family: str
    max_context: int
    weight_bytes: int
    download_bytes: int
    pack_bytes: int
    free_bytes: int
    used_bytes: int
    architecture: str = ""
    wrapper: str = ""
    hosted_as: str = ""
    task: str = "generate"
    num_parameters: int = 0
    dtype: str = ""
    source_format: str = ""
    choices: tuple[HostingChoice, ...] = ()


def judge(folder: Path) -> Blueprint:
    """A folder that has no weights yet. Raises RegistrationRefused as `convert.inspect` does."""
    config = load_config(folder)
    check_tokenizer(folder)
    plan = plan_model(config, folder)
    check_numbers(folder, plan)
    return plan


def preflight(
    plan: Blueprint,
    dtype: str,
    files_bytes: int,
    download_bytes: int,
    dest: Path,
    room: Room,
    declared: Declared | None = None,
) -> Preflight:
    """Look. `files_bytes`: of the checkpoint's weights as they are in its files."""
    own = "bfloat16" if declared is not None else _own_dtype(plan, files_bytes)
    dtype = own if dtype == "auto" else dtype
    weight_bytes = _weight_bytes(plan, dtype, declared)
    hosted_as = "text class" if plan.is_text_class else "flat wrapper"
    return Preflight(
        family=str(plan.config.model_type),
        max_context=plan.max_context,
        weight_bytes=weight_bytes,
        download_bytes=download_bytes,
        pack_bytes=weight_bytes,
        free_bytes=shutil.disk_usage(_existing(dest)).free,
        used_bytes=sum(folder_bytes(folder) for folder in room.folders),
        architecture=type(plan.skeleton).__name__,
        wrapper=str(plan.wrapper.config.model_type) if plan.wrapper else "",
        hosted_as=hosted_as if plan.wrapper else "",
        task=plan.task,
        num_parameters=sum(plan.tensors[name].numel() for name in _held(plan)),
        dtype=dtype,
        source_format=declared.method if declared else "",
        choices=tuple(_choices(plan, own, declared, room.arena_bytes)),
    )


def check_disk(found: Preflight, label: str, room: Room) -> None:
    """Raises RegistrationRefused where the disk or the quota has too little left."""
    needed = found.download_bytes + found.pack_bytes
    split = f"{_size(found.download_bytes)} to download and {_size(found.pack_bytes)} for the pack"
    advice = "or remove models (a running server deletes their packs at its next start)"
    if found.free_bytes < needed + DISK_MARGIN_BYTES:
        raise RegistrationRefused(
            "disk_full",
            f"{label} needs {_size(needed)} of disk space ({split}), but only "
            f"{_size(found.free_bytes)} are free and {_size(DISK_MARGIN_BYTES)} of these stay "
            f"reserved: free disk space, {advice}",
        )
    if room.quota_bytes and found.used_bytes + needed > room.quota_bytes:
        raise RegistrationRefused(
            "disk_quota",
            f"{label} needs {_size(needed)} of disk space ({split}); packs and downloads already "
            f"take {_size(found.used_bytes)}, and packs_quota_bytes is "
            f"{_size(room.quota_bytes)}: raise it, {advice}",
        )


def check_arena(found: Preflight, label: str, room: Room) -> None:
    """Raises RegistrationRefused for a model that the worker could never load."""
    if room.arena_bytes and found.weight_bytes > room.arena_bytes:
        raise RegistrationRefused(
            "too_large",
            f"{label} has {_size(found.weight_bytes)} of weights, more than "
            f"device_budget_bytes ({_size(room.arena_bytes)}), so it could never be loaded: raise "
            "the budget, or register it with a smaller --dtype",
        )


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below; those that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _held(plan: Blueprint) -> list[str]:
    """Names of the tensors that a pack has."""
    return [name for name in plan.tensors if name not in plan.tied]


def _own_dtype(plan: Blueprint, files_bytes: int) -> str:
    """What "auto" takes of a plain checkpoint."""
    named = getattr(plan.config, "dtype", None)
    if named:
        return "bfloat16" if named in (torch.bfloat16, torch.float16) else "float32"
    count = sum(plan.tensors[name].numel() for name in _held(plan))
    return "bfloat16" if files_bytes < 3 * count else "float32"


def _weight_bytes(plan: Blueprint, dtype: str, declared: Declared | None) -> int:
    names = _held(plan)
    if dtype in QUANTIZATIONS:
        anew, scheme = _rounded_anew(plan, declared), declared.scheme if declared else ""
        schemes = schemes_of(plan, names, dtype, lambda name: "" if name in anew else scheme)
        rest = [name for name in names if name not in schemes]
        size = sum(
            kept_bytes(linear_shape(plan.skeleton, name), how) for name, how in schemes.items()
        )
        return size + sum(
            plan.tensors[name].numel() * plan.dtype_of(name, torch.bfloat16).itemsize
            for name in rest
        )
    kind: Any = getattr(torch, dtype)
    return sum(plan.tensors[name].numel() * plan.dtype_of(name, kind).itemsize for name in names)


def _kv_bytes(plan: Blueprint, dtype: str) -> int:
    """Of a sequence of KV_TOKENS tokens, without what pages and extents add."""
    rows = sum(
        group.values_per_token * min(KV_TOKENS, group.window or group.chunk or KV_TOKENS)
        for group in plan.kv_groups
    )
    kind: Any = torch.bfloat16 if dtype in QUANTIZATIONS else getattr(torch, dtype)
    states: int = sum(
        len(group.states) * math.prod(group.shape) * getattr(torch, group.dtype).itemsize
        for group in plan.state_groups(kind)
    )
    return int(rows * kind.itemsize) + states


def _rounded_anew(plan: Blueprint, declared: Declared | None) -> frozenset[str]:
    """Weights whose codes an int4 pack cannot have: experts that have to be stacked first. MXFP4's
    are published as a stack."""
    if declared is None or declared.method == "mxfp4":
        return frozenset()
    return expert_weights(plan.skeleton)


def _errors_of(plan: Blueprint, declared: Declared | None, own: str) -> dict[str, float]:
    """What rounding adds by dtype. `own`: what "auto" takes."""
    if declared is None:
        return _PLAIN_ERRORS[own]
    # Codes of eight bits are rounded to four as FP8 is.
    kind = "fp8" if declared.bits == (8,) else declared.method
    errors = dict(zip(_TARGETS, _ADDED_ERRORS[kind], strict=True))
    if declared.method == "fp8" and not declared.blocks:
        errors["fp8"] = 0.0  # a scale a row or for all: the codes are kept
    if declared.scheme and not _rounded_anew(plan, declared):
        errors["int4"] = _KEPT_ERRORS[declared.scheme]
    return errors


def _choices(
    plan: Blueprint, own: str, declared: Declared | None, arena_bytes: int
) -> Iterator[HostingChoice]:
    for dtype, added in _errors_of(plan, declared, own).items():
        try:
            weight_bytes = _weight_bytes(plan, dtype, declared)
        except RegistrationRefused:  # a family without plain linears; experts in fp8
            continue
        kv_bytes = _kv_bytes(plan, dtype)
        fits = weight_bytes + kv_bytes <= arena_bytes if arena_bytes else None
        yield HostingChoice(dtype, weight_bytes, added, kv_bytes, fits)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
