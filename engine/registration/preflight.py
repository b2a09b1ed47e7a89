"""What a registration will take, reported and checked before anything large is fetched or written.

From the configuration, the files' sizes and the disk: family, bytes of the weights as hosted, bytes
still to fetch, bytes the pack will take; for a quantized checkpoint what each dtype would take and
what rounding its weights once more adds; against the disk's free space, the operator's quota for
packs and downloads together, and the worker's arena where its size is known. Reads sizes, changes
nothing. Estimates of the pack are within its alignment; where "auto" has to guess the checkpoint's
type (a configuration that does not say), the size of the files decides.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import RegistrationRefused
from engine.modules.experts import linear_shape
from engine.registration.blueprint import Blueprint
from engine.registration.encoder_blueprint import plan_model
from engine.registration.numbers import check_numbers
from engine.registration.quantize import QUANTIZATIONS, kept_bytes, schemes_of
from engine.registration.source import check_tokenizer, load_config
from engine.registration.tensors import Declared

DISK_MARGIN_BYTES = 64 << 20
"""Free space that a registration leaves to the database, the logs and everybody else."""

_TARGETS = ("bfloat16", "int8", "int4")
# What rounding once more adds, by how a checkpoint is quantized: measured on synthetic weights
# (docs/packs.md). `int4` are integers of four bits with zeros; without these codes are kept.
_ADDED_ERRORS: dict[str, tuple[float, float, float]] = {
    "fp8": (0.0017, 0.014, 0.088),
    "symmetric int4": (0.0017, 0.012, 0.0017),
    "int4": (0.0017, 0.012, 0.044),
    "gptq": (0.0017, 0.012, 0.044),
    "awq": (0.0017, 0.013, 0.044),
    "mxfp4": (0.0, 0.011, 0.049),
    "compressed-tensors": (0.002, 0.014, 0.087),
    "modelopt": (0.002, 0.014, 0.088),
    "bitsandbytes": (0.002, 0.013, 0.085),
    "gguf": (0.0017, 0.013, 0.085),
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
    """What hosting a quantized checkpoint in `dtype` takes.

    added_error   root mean square of what this rounding adds, over that of the weights
    """

    dtype: str
    weight_bytes: int
    added_error: float


@dataclass(frozen=True, slots=True)
class Preflight:
    """The figures, in bytes: what is still to come, and what there is.

    source_format   how the checkpoint is quantized, "" where it is not
    choices         for such a checkpoint: in which dtypes it can be hosted
    """

    family: str
    max_context: int
    weight_bytes: int
    download_bytes: int
    pack_bytes: int
    free_bytes: int
    used_bytes: int
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
    if declared is not None and dtype == "auto":
        dtype = "bfloat16"
    weight_bytes = _weight_bytes(plan, dtype, files_bytes)
    return Preflight(
        family=str(plan.config.model_type),
        max_context=plan.max_context,
        weight_bytes=weight_bytes,
        download_bytes=download_bytes,
        pack_bytes=weight_bytes,
        free_bytes=shutil.disk_usage(_existing(dest)).free,
        used_bytes=sum(folder_bytes(folder) for folder in room.folders),
        source_format=declared.method if declared else "",
        choices=_choices(plan, declared) if declared else (),
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


def _weight_bytes(plan: Blueprint, dtype: str, files_bytes: int) -> int:
    names = [name for name in plan.tensors if name not in plan.tied]
    if dtype == "auto":
        named = getattr(plan.config, "dtype", None)
        count = sum(plan.tensors[name].numel() for name in names)
        half = named in (torch.bfloat16, torch.float16) if named else files_bytes < 3 * count
        dtype = "bfloat16" if half else "float32"
    if dtype in QUANTIZATIONS:
        schemes = schemes_of(plan, names, dtype)
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


def _choices(plan: Blueprint, declared: Declared) -> tuple[HostingChoice, ...]:
    found = []
    kind = declared.method
    if declared.bits == (4,):
        kind = "symmetric int4" if declared.keeps_codes else "int4"
    elif declared.bits == (8,) and kind == "gptq":
        kind = "fp8"
    for dtype, added in zip(_TARGETS, _ADDED_ERRORS[kind], strict=True):
        try:
            found.append(HostingChoice(dtype, _weight_bytes(plan, dtype, 0), added))
        except RegistrationRefused:  # a family without plain linears
            continue
    return tuple(found)


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
