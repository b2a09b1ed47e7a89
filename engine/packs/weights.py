"""Reading packs: is the folder whole, are its bytes those that were written, tensors over them.

`loader.py` brings the bytes into the arena; here is what it checks them with, and the views that a
resident model's parameters point to. Knows packs and memory, not models or states.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from engine.errors import ChecksumMismatch, PackError
from engine.pack import (
    BLOB_NAME,
    CHUNK_BYTES,
    MEMBER_ALIGN,
    ROW_DTYPES,
    SCALE_SUFFIX,
    SEGMENT_ALIGN,
    Chunk,
    PackIndex,
    is_one_run,
    read_index,
)
from kernels.int4_blocks import FORMS

# One read and one checksum update at a time, so that the second finds the bytes in the core's
# cache: 76 % of a bare preadv instead of 64 % with whole chunks (docs/log.md).
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightViews:
    """A resident model's tensors over the arena. `generation` changes with each load.

    Valid until the model's pages are released; whoever keeps them must drop them before.
    """

    tensors: dict[str, torch.Tensor]
    generation: int


def build_views(
    arena: torch.Tensor, index: PackIndex, segment_offsets: Sequence[int], generation: int
) -> WeightViews:
    """Every tensor under each of its names; `segment_offsets` are bytes of the arena."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in index.tensors:
        start = segment_offsets[entry.segment] + entry.offset
        raw = arena[start : start + entry.num_bytes]
        tensors[entry.name] = raw.view(getattr(torch, entry.dtype)).view(entry.shape)
    for name, holder in index.tied.items():
        tensors[name] = tensors[holder]
    return WeightViews(tensors, generation)


def check_pack(pack_dir: Path, index: PackIndex) -> None:
    """Raises PackError unless sizes, offsets and the small files are as the index says.

    Together with the chunks' checksums this covers every byte of the folder.
    """
    check_files(pack_dir, index)
    check_layout(pack_dir, index)


def check_files(pack_dir: Path, index: PackIndex) -> None:
    """The small files: read and hashed whole, which takes its time for a large tokenizer.

    Raises PackError.
    """
    try:
        for name, expected in index.files.items():
            if xxhash.xxh3_64_intdigest((pack_dir / name).read_bytes()) != expected:
                raise ChecksumMismatch(f"{pack_dir / name} is damaged: register the model again")
    except OSError as error:
        raise PackError(
            f"the pack {pack_dir} is incomplete ({error}): register the model again"
        ) from error


def check_layout(pack_dir: Path, index: PackIndex) -> None:
    """The blob's size and what the index says of it; reads no file. Raises PackError."""
    try:
        size = (pack_dir / BLOB_NAME).stat().st_size
    except OSError as error:
        raise PackError(
            f"the pack {pack_dir} is incomplete ({error}): register the model again"
        ) from error
    if size != index.total_bytes:
        raise PackError(
            f"{pack_dir / BLOB_NAME} has {size} bytes instead of {index.total_bytes}: "
            "register the model again"
        )
    problem = _layout_problem(index)
    if problem:
        raise PackError(
            f"the index of the pack {pack_dir} is invalid ({problem}): register the model again"
        )


def _layout_problem(index: PackIndex) -> str:
    end = 0
    for segment in index.segments:
        if segment.offset != end or segment.num_bytes % SEGMENT_ALIGN or segment.num_bytes < 0:
            return f"segment {segment.name} is out of place"
        end += segment.num_bytes
    if end != index.total_bytes:
        return "segments do not fill the blob"
    covered = [0] * len(index.segments)
    for chunk in index.chunks:
        if not 0 <= chunk.segment < len(covered) or chunk.offset != covered[chunk.segment]:
            return "chunks leave gaps"
        if not 0 < chunk.num_bytes <= CHUNK_BYTES:
            return "a chunk is too large"
        covered[chunk.segment] += chunk.num_bytes
    if covered != [segment.num_bytes for segment in index.segments]:
        return "chunks do not cover the segments"
    names = set()
    for entry in index.tensors:
        names.add(entry.name)
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype) or not 0 <= entry.segment < len(index.segments):
            return f"tensor {entry.name} has no dtype or no segment"
        if entry.num_bytes != torch.Size(entry.shape).numel() * dtype.itemsize:
            return f"tensor {entry.name} has another size than its shape"
        room = index.segments[entry.segment].num_bytes
        if entry.offset % MEMBER_ALIGN or not 0 <= entry.offset <= room - entry.num_bytes:
            return f"tensor {entry.name} is outside its segment"
    if not set(index.tied.values()) <= names:
        return "a tied tensor is missing"
    return _form_problem(index)


def _form_problem(index: PackIndex) -> str:
    """What the index says of quantized and of neighbouring tensors."""
    entries = {entry.name: entry for entry in index.tensors}
    for entry in index.tensors:
        scales = entries.get(entry.name + SCALE_SUFFIX)
        if entry.scheme not in ("", *ROW_DTYPES, *FORMS):
            return f"tensor {entry.name} is quantized in a way this build does not know"
        blocks = entry.dtype == "uint8" and len(entry.shape) in (3, 4)
        form = FORMS.get(entry.scheme)
        if form is not None and not (blocks and entry.shape[-1] == form.block_bytes):
            return f"tensor {entry.name} is not in blocks"
        if entry.scheme in ROW_DTYPES:
            if scales is None or scales.shape != entry.shape[:-1]:
                return f"tensor {entry.name} has no scales"
            if entry.dtype != ROW_DTYPES[entry.scheme]:
                return f"tensor {entry.name} is not {ROW_DTYPES[entry.scheme]}"
    for group in index.fused:
        if not is_one_run(group, entries):
            return f"the tensors of {group.name} do not lie together"
    return ""


def read_chunk(
    descriptor: int,
    index: PackIndex,
    chunk: Chunk,
    target: memoryview,
    verify: bool = True,
    cancelled: Callable[[], bool] = lambda: False,
) -> bool:
    """Read one chunk of the blob into `target` (as long as the chunk); False if cancelled.

    Releases the GIL while reading and hashing. Raises ChecksumMismatch, PackError, OSError.
    """
    start = index.segments[chunk.segment].offset + chunk.offset
    digest = xxhash.xxh3_64()
    done = 0
    while done < chunk.num_bytes:
        if cancelled():
            return False
        block = target[done : min(done + READ_BYTES, chunk.num_bytes)]
        count = os.preadv(descriptor, [block], start + done)
        if count == 0:
            raise PackError(
                f"the blob of pack {index.revision} is truncated: register the model again"
            )
        if verify:
            digest.update(block[:count])
        done += count
    if verify and digest.intdigest() != chunk.xxh3:
        raise ChecksumMismatch(
            f"pack {index.revision} is damaged at byte {start} of its blob (segment "
            f"{index.segments[chunk.segment].name}): register the model again"
        )
    return True


def verify_blob(pack_dir: Path, index: PackIndex) -> None:
    """Read the whole blob and compare its checksums. Raises PackError."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        descriptor = os.open(pack_dir / BLOB_NAME, os.O_RDONLY)
        try:
            for chunk in index.chunks:
                read_chunk(descriptor, index, chunk, buffer[: chunk.num_bytes])
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PackError(f"the pack {pack_dir} cannot be read ({error})") from error


class PackSource(Protocol):
    """Packs by their folders."""

    def stamp(self, pack_dir: Path) -> tuple[int, ...]:
        """What changes when a pack is registered anew; () where there is none."""

    def read(self, pack_dir: Path) -> PackIndex:
        """Its index. Raises PackError where this build cannot use the pack."""


class DiskPacks:
    """Implements PackSource on folders as `pack.py` describes them."""

    def stamp(self, pack_dir: Path) -> tuple[int, ...]:
        """Identity of the blob file."""
        try:
            status = (pack_dir / BLOB_NAME).stat()
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, pack_dir: Path) -> PackIndex:
        """The index, its blob looked at but not read."""
        index = read_index(pack_dir)
        check_layout(pack_dir, index)
        return index
