"""Writing a checkpoint pack: from a checked source folder to one blob, an index and checksums.

Registration's last step. Tensors come one at a time and are cast and written at their place; then
the blob is read back once for its checksums, so that what was written is what they name. A pack is
built in a temporary folder beside its destination and renamed when everything is on the disk: a
folder under its revision's name is a whole pack. Same content, dtype and version: same revision,
and a whole pack that is already there is used as it is.

Goes in: a folder in Hugging Face's layout. Comes out: what `pack.py` describes.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash

from engine.blueprint import REST, Blueprint, blueprint, layer_of
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.errors import PackError
from engine.pack import (
    BLOB_NAME,
    CHUNK_BYTES,
    PACK_VERSION,
    SEGMENT_ALIGN,
    TENSOR_ALIGN,
    Chunk,
    PackIndex,
    Segment,
    TensorEntry,
    read_index,
    write_index,
)
from engine.source import (
    COPIED_FILES,
    Progress,
    SourceTensors,
    check_tokenizer,
    content_digest,
    load_config,
    weight_files,
)
from engine.weights import check_pack, verify_blob

DtypeChoice = Literal["auto", "float32", "bfloat16"]
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source folder that passed every check that needs no bytes of its weights."""

    folder: Path
    files: list[Path]
    blueprint: Blueprint


def inspect(folder: Path) -> Candidate:
    """Raises RegistrationRefused with what the operator should do."""
    config = load_config(folder)
    files = weight_files(folder)
    check_tokenizer(folder)
    return Candidate(folder, files, blueprint(config))


def write_pack(
    candidate: Candidate, dest: Path, dtype: DtypeChoice, progress: Progress
) -> tuple[Path, PackIndex]:
    """Write the pack below `dest`, or find it there whole. Raises RegistrationRefused, OSError."""
    dest.mkdir(parents=True, exist_ok=True)
    clean_leftovers(dest)
    with SourceTensors(candidate.files) as source:
        checkpoint = open_checkpoint(candidate.blueprint, source)
        chosen = choose_dtype(dtype, source)
        revision = _revision(candidate, chosen, progress)
        final = dest / revision
        existing = whole_pack(final)
        if existing is not None:
            return final, existing
        temporary = dest / f"{_TEMPORARY}{os.getpid()}-{revision}"
        temporary.mkdir()
        try:
            index = _write_folder(candidate, checkpoint, chosen, revision, temporary, progress)
            _rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final, index


def choose_dtype(choice: DtypeChoice, source: SourceTensors) -> torch.dtype:
    """auto: bfloat16 for half-precision checkpoints, else float32; float16 is never hosted."""
    if choice == "float32":
        return torch.float32
    if choice == "bfloat16":
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
    for path in dest.glob(f"{_TEMPORARY}*"):
        owner = path.name.removeprefix(_TEMPORARY).partition("-")[0]
        # Our own number: an earlier process had it (one process makes one pack at a time).
        if not owner.isdigit() or int(owner) == os.getpid() or not _is_alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def lay_out(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> tuple[tuple[Segment, ...], tuple[TensorEntry, ...]]:
    """Place every tensor: REST first, then the layers in order, each tensor TENSOR_ALIGNed."""
    members: dict[str, list[str]] = {REST: []}
    for name in checkpoint.names():
        members.setdefault(layer_of(name), []).append(name)
    order = sorted(members, key=lambda segment: -1 if segment == REST else int(segment[6:]))
    segments: list[Segment] = []
    entries: list[TensorEntry] = []
    start = 0
    for number, segment in enumerate(order):
        offset = 0
        for name in members[segment]:
            offset = _align(offset, TENSOR_ALIGN)
            meta = checkpoint.blueprint.tensors[name]
            kind = checkpoint.blueprint.dtype_of(name, dtype)
            size = meta.numel() * kind.itemsize
            shape = tuple(meta.shape)
            entries.append(TensorEntry(name, number, offset, size, shape, _dtype_name(kind)))
            offset += size
        size = _align(offset, SEGMENT_ALIGN)
        segments.append(Segment(segment, start, size))
        start += size
    return tuple(segments), tuple(entries)


def _write_folder(
    candidate: Candidate,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    revision: str,
    folder: Path,
    progress: Progress,
) -> PackIndex:
    plan = candidate.blueprint
    segments, entries = lay_out(checkpoint, dtype)
    total = sum(segment.num_bytes for segment in segments)
    _write_blob(folder / BLOB_NAME, checkpoint, segments, entries, progress)
    files: dict[str, int] = {}
    for name in COPIED_FILES:
        if (candidate.folder / name).is_file():
            shutil.copyfile(candidate.folder / name, folder / name)
            files[name] = xxhash.xxh3_64_intdigest((folder / name).read_bytes())
    index = PackIndex(
        version=PACK_VERSION,
        revision=revision,
        family=str(plan.config.model_type),
        architecture=type(plan.skeleton).__name__,
        dtype=_dtype_name(dtype),
        vocab_size=plan.vocab_size,
        max_context=plan.max_context,
        total_bytes=total,
        segments=segments,
        tensors=entries,
        tied=checkpoint.tied,
        chunks=_checksums(folder / BLOB_NAME, segments),
        kv_groups=plan.kv_groups,
        kv_dtype=_dtype_name(dtype),
        files=files,
    )
    write_index(folder, index)
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    return index


def _write_blob(
    path: Path,
    checkpoint: Checkpoint,
    segments: tuple[Segment, ...],
    entries: tuple[TensorEntry, ...],
    progress: Progress,
) -> None:
    places = {entry.name: entry for entry in entries}
    total = sum(entry.num_bytes for entry in entries)
    done = 0
    with path.open("wb", buffering=0) as file:
        # The gaps between tensors read as zeros.
        file.truncate(segments[-1].offset + segments[-1].num_bytes)
        for name, tensor in checkpoint.tensors():
            entry = places[name]
            cast = tensor.to(getattr(torch, entry.dtype)).contiguous().reshape(-1)
            data = cast.view(torch.uint8).numpy().data
            offset = segments[entry.segment].offset + entry.offset
            written = 0
            while written < len(data):
                written += os.pwrite(file.fileno(), data[written:], offset + written)
            done += entry.num_bytes
            progress("convert", done, total)


def _checksums(path: Path, segments: tuple[Segment, ...]) -> tuple[Chunk, ...]:
    if not path.stat().st_size:
        return ()
    blob = np.memmap(path, dtype=np.uint8, mode="r")
    chunks: list[Chunk] = []
    for number, segment in enumerate(segments):
        for offset in range(0, segment.num_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, segment.num_bytes - offset)
            start = segment.offset + offset
            digest = xxhash.xxh3_64_intdigest(blob[start : start + size].data)
            chunks.append(Chunk(number, offset, size, digest))
    return tuple(chunks)


def _revision(candidate: Candidate, dtype: torch.dtype, progress: Progress) -> str:
    copied = [candidate.folder / name for name in COPIED_FILES]
    paths = candidate.files + [path for path in copied if path.is_file()]
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{PACK_VERSION} {_dtype_name(dtype)}\n".encode())
    digest.update(content_digest(paths, progress))
    return digest.hexdigest()


def _rename(temporary: Path, final: Path) -> None:
    """Move the finished folder to its name, over a damaged one if need be."""
    if final.exists():
        aside = temporary.with_name(f"{temporary.name}-old")
        final.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        temporary.rename(final)
    except OSError:
        # Another process finished the same revision in between: its pack is as good.
        if whole_pack(final) is None:
            raise
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


def _align(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
