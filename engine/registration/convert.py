"""Writing a checkpoint pack: from a checked source folder to one blob, an index and checksums.

Registration's last step. Tensors come one at a time and are cast and written at their place; then
the blob is read back once for its checksums, so that what was written is what they name. A pack is
built in a temporary folder beside its destination and renamed when everything is on the disk: a
folder under its revision's name is a whole pack. Same content, dtype and version: same revision,
and a whole pack that is already there is used as it is.

Goes in: a folder in Hugging Face's layout. Comes out: what `pack.py` describes.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
import xxhash

from engine.errors import PackError, RegistrationRefused
from engine.modules.experts import as_linears
from engine.pack import (
    BLOB_NAME,
    CHUNK_BYTES,
    SCALE_SUFFIX,
    Chunk,
    PackIndex,
    Schemes,
    Segment,
    TensorEntry,
    read_index,
    write_index,
)
from engine.packs import check_pack, verify_blob
from engine.protocol import PACK_VERSION
from engine.registration.blueprint import Blueprint
from engine.registration.checkpoint import Checkpoint, open_checkpoint
from engine.registration.encoder_blueprint import plan_model
from engine.registration.layout import PackLayout, lay_out
from engine.registration.numbers import check_numbers
from engine.registration.quantize import (
    QUANTIZATIONS,
    quantize_rows,
    quantize_stack,
    schemes_of,
)
from engine.registration.source import (
    CONFIG_NAME,
    COPIED_FILES,
    Progress,
    check_tokenizer,
    content_digest,
    declared_of,
    load_config,
    read_json,
    weight_files,
    without_quantization,
)
from engine.registration.tensors import BESIDE, Declared, Tensors, open_tensors
from kernels import int4_blocks
from kernels.int4_blocks import FORMS, ROWS, Steps

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "int4"]
TEMPORARY = ".tmp-"
# A folder of this process that is no pack: a source (staging.py).
SOURCE_SUFFIX = "-source"
# In the revisions of quantized packs: which weights are rounded, and how. A pack of another recipe
# stays what it is; registering its source again makes a new one.
_RECIPE = 3
# The same for checkpoints that are quantized themselves: how their values are made.
_READING = 2


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """A source folder that passed every check that needs no bytes of its weights."""

    folder: Path
    files: list[Path]
    blueprint: Blueprint
    declared: Declared | None = None


def inspect(folder: Path) -> CheckedSource:
    """Raises RegistrationRefused with what the operator should do."""
    config = load_config(folder)
    files = weight_files(folder)
    check_tokenizer(folder)
    plan = plan_model(config, folder)
    check_numbers(folder, plan)
    return CheckedSource(folder, files, plan, declared_of(folder))


def write_pack(
    candidate: CheckedSource, dest: Path, dtype: DtypeChoice, progress: Progress
) -> tuple[Path, PackIndex]:
    """Write the pack below `dest`, or find it there whole. Raises RegistrationRefused, OSError."""
    dest.mkdir(parents=True, exist_ok=True)
    clean_leftovers(dest)
    with open_tensors(candidate.files, candidate.declared) as source:
        checkpoint = open_checkpoint(candidate.blueprint, source)
        chosen = choose_dtype(dtype, source)
        schemes: Schemes = {}
        kept = _dtype_name(chosen)
        if dtype in QUANTIZATIONS:
            schemes = schemes_of(candidate.blueprint, checkpoint.names(), dtype, checkpoint.scheme)
            kept = f"{dtype} {_RECIPE}"
        if candidate.declared is not None:
            kept += f" from {candidate.declared.method} {_READING}"
        revision = _revision(candidate, kept, progress)
        final = dest / revision
        existing = whole_pack(final)
        if existing is not None:
            return final, existing
        temporary = dest / f"{TEMPORARY}{os.getpid()}-{revision}"
        temporary.mkdir()
        try:
            layout = lay_out(candidate.blueprint, checkpoint.names(), chosen, schemes)
            quantization = dtype if dtype in QUANTIZATIONS else ""
            work = _Work(candidate, checkpoint, chosen, layout, revision, quantization)
            index = _write_folder(work, temporary, progress)
            _rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final, index


def choose_dtype(choice: DtypeChoice, source: Tensors) -> torch.dtype:
    """What is computed in. auto: bfloat16 for half-precision checkpoints, else float32.

    float16 only where it is asked for (processors have no arithmetic for it, and its range ends at
    65,504); quantized weights are computed with in bfloat16.
    """
    if choice == "float32":
        return torch.float32
    if choice == "float16":
        return torch.float16
    if choice == "bfloat16" or choice in QUANTIZATIONS:
        return torch.bfloat16
    return torch.bfloat16 if source.float_dtype() in ("BF16", "F16") else torch.float32


def whole_pack(pack_dir: Path) -> PackIndex | None:
    """The index of the pack in `pack_dir` if every byte of it is as written, else None."""
    try:
        index = read_index(pack_dir)
        check_pack(pack_dir, index)
        verify_blob(pack_dir, index)
    except PackError:
        return None
    return index


def clean_leftovers(dest: Path) -> None:
    """Remove temporary folders of registrations that died."""
    for path in dest.glob(f"{TEMPORARY}*"):
        owner = path.name.removeprefix(TEMPORARY).partition("-")[0]
        if owner == str(os.getpid()) and path.name.endswith(SOURCE_SUFFIX):
            continue
        # Our own number: an earlier process had it (one process makes one pack at a time).
        if not owner.isdigit() or int(owner) == os.getpid() or not _is_alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Work:
    """One pack to write."""

    candidate: CheckedSource
    checkpoint: Checkpoint
    dtype: torch.dtype
    layout: PackLayout
    revision: str
    quantization: str


def _write_folder(work: _Work, folder: Path, progress: Progress) -> PackIndex:
    plan, layout = work.candidate.blueprint, work.layout
    _write_blob(folder / BLOB_NAME, work.checkpoint, layout, progress)
    files: dict[str, int] = {}
    for name in COPIED_FILES:
        if (work.candidate.folder / name).is_file():
            shutil.copyfile(work.candidate.folder / name, folder / name)
            if name == CONFIG_NAME and plan.is_text_class:
                (folder / name).write_text(plan.config.to_json_string(use_diff=False), "utf-8")
            elif name == CONFIG_NAME and work.candidate.declared is not None:
                config = read_json(folder / name, "bad_config", dict)
                text = json.dumps(without_quantization(config), indent=2)
                (folder / name).write_text(text, encoding="utf-8")
            files[name] = xxhash.xxh3_64_intdigest((folder / name).read_bytes())
    index = PackIndex(
        version=PACK_VERSION,
        revision=work.revision,
        family=str(plan.config.model_type),
        architecture=type(plan.skeleton).__name__,
        dtype=_dtype_name(work.dtype),
        vocab_size=plan.vocab_size,
        max_context=plan.max_context,
        total_bytes=sum(segment.num_bytes for segment in layout.segments),
        segments=layout.segments,
        tensors=layout.tensors,
        tied=_tied(work.checkpoint.tied, layout),
        chunks=_checksums(folder / BLOB_NAME, layout.segments),
        kv_groups=plan.kv_groups,
        states=plan.state_groups(work.dtype),
        kv_dtype=_dtype_name(work.dtype),
        files=files,
        task=plan.task,
        encoder=plan.encoder,
        quantization=work.quantization,
        fused=layout.fused,
    )
    write_index(folder, index)
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    return index


def _write_blob(path: Path, checkpoint: Checkpoint, layout: PackLayout, progress: Progress) -> None:
    places = {entry.name: entry for entry in layout.tensors}
    total = sum(entry.num_bytes for entry in layout.tensors)
    done = 0
    skeleton = checkpoint.blueprint.skeleton
    # Buffers may hold infinity: masks do.
    weights = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    with path.open("wb", buffering=0) as file:
        # The gaps between tensors read as zeros.
        file.truncate(sum(segment.num_bytes for segment in layout.segments))
        steps: Steps | None = None
        for name, row, part in checkpoint.parts():
            entry = places[name]
            if row == 0:
                steps = checkpoint.steps(name, entry.scheme) if entry.scheme else None
            scales = places.get(name + SCALE_SUFFIX) if entry.scheme else None
            if name in weights:
                _check_finite(name, part)
            if entry.scheme:
                given = None if steps is None else steps.of_rows(row, row + len(part))
                kept = _quantized(entry, as_linears(skeleton, name, part), scales, given)
            else:
                kept = [(entry, _cast(name, part, getattr(torch, entry.dtype)))]
            for place, tensor in kept:
                rows = place.shape[0] if place.shape else 1
                in_blocks = place.scheme in FORMS and part.dim() == 2
                first = row // ROWS if in_blocks else row
                start = layout.segments[place.segment].offset + place.offset
                done += _write(file.fileno(), tensor, start + first * (place.num_bytes // rows))
            progress("convert", done, total)


def _check_finite(name: str, part: torch.Tensor) -> None:
    """A third of what a cast takes: one pass, and nothing allocated."""
    if part.is_floating_point() and part.numel():
        low, high = torch.aminmax(part)  # NaN goes through
        if not (low.isfinite() and high.isfinite()):
            raise RegistrationRefused(
                "bad_weights",
                f"{name} has weights that are not finite (NaN or infinity); download the model "
                "again, or use another checkpoint",
            )


def _cast(name: str, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Raises RegistrationRefused where finite values would become infinite."""
    cast = part.to(dtype)
    if not (dtype.is_floating_point and part.is_floating_point() and part.numel()):
        return cast
    most = torch.finfo(dtype).max
    if most >= torch.finfo(part.dtype).max or torch.stack(torch.aminmax(cast)).isfinite().all():
        return cast
    if bool((part.isfinite() & ~cast.isfinite()).any()):
        wider = {torch.float16: "register it as bfloat16", torch.bfloat16: "register it as float32"}
        raise RegistrationRefused(
            "out_of_range",
            f"{name} has values beyond the range of {_dtype_name(dtype)} ({most:.6g}); "
            + wider.get(dtype, "use another checkpoint"),
        )
    return cast


def _quantized(
    entry: TensorEntry,
    part: torch.Tensor,
    scales: TensorEntry | None,
    steps: Steps | None,
) -> list[tuple[TensorEntry, torch.Tensor]]:
    """What is kept of some rows, and where."""
    try:
        if part.dim() == 3:
            dtype = torch.bfloat16 if scales is None else getattr(torch, scales.dtype)
            stack, of_rows = quantize_stack(part, entry.scheme, dtype, steps)
            if scales is None or of_rows is None:
                return [(entry, stack)]
            return [(entry, stack), (scales, of_rows)]
        if scales is None:
            return [(entry, int4_blocks.quantize(part, steps=steps, scheme=entry.scheme))]
        values, scale = quantize_rows(part, getattr(torch, scales.dtype), entry.scheme, steps)
    except ValueError as error:
        raise RegistrationRefused("bad_weights", f"{entry.name}: {error}") from error
    return [(entry, values), (scales, scale)]


def _tied(tied: dict[str, str], layout: PackLayout) -> dict[str, str]:
    """With the scales of those that are quantized."""
    scales = {entry.name for entry in layout.tensors if entry.name.endswith(SCALE_SUFFIX)}
    pairs = ((name + SCALE_SUFFIX, holder + SCALE_SUFFIX) for name, holder in tied.items())
    return tied | {name: holder for name, holder in pairs if holder in scales}


def _write(descriptor: int, tensor: torch.Tensor, place: int) -> int:
    """Write a tensor's bytes; how many they were."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], place + written)
    return written


def _checksums(path: Path, segments: tuple[Segment, ...]) -> tuple[Chunk, ...]:
    """Read back and not mapped: see tensors/files.py."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    chunks: list[Chunk] = []
    with path.open("rb", buffering=0) as file:
        for number, segment in enumerate(segments):
            for offset in range(0, segment.num_bytes, CHUNK_BYTES):
                block = buffer[: min(CHUNK_BYTES, segment.num_bytes - offset)]
                done = 0
                while done < len(block):
                    count = os.preadv(file.fileno(), [block[done:]], segment.offset + offset + done)
                    if not count:
                        raise OSError(f"{path} became shorter while it was written")
                    done += count
                chunks.append(Chunk(number, offset, len(block), xxhash.xxh3_64_intdigest(block)))
    return tuple(chunks)


def _revision(candidate: CheckedSource, kept: str, progress: Progress) -> str:
    copied = [candidate.folder / name for name in (*COPIED_FILES, *BESIDE)]
    paths = candidate.files + [path for path in copied if path.is_file()]
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{PACK_VERSION} {kept}\n".encode())
    if candidate.blueprint.encoder is not None:
        # What its files say of pooling and the longest input, in folders of their own.
        plan = candidate.blueprint
        digest.update(msgspec.json.encode([plan.task, plan.encoder, plan.max_context]))
    if candidate.blueprint.wrapper is not None:
        digest.update(type(candidate.blueprint.skeleton).__name__.encode())
    digest.update(content_digest(paths, progress))
    return digest.hexdigest()


def _rename(temporary: Path, final: Path) -> None:
    """Move the finished folder to its name, over a damaged one if need be."""
    aside = temporary.with_name(f"{temporary.name}-old")
    if final.exists():
        if whole_pack(final) is not None:
            # Another process finished the same revision meanwhile: it may be served already.
            return
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if whole_pack(final) is None:
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
