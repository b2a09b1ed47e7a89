"""Checkpoint packs: what a pack folder holds and how its index reads. Schema only.

    <pack_dir>/
        index.msgpack        PackIndex and its xxh3_64; written last: a folder without it is no pack
        weights.bin          one blob in arena layout: segments in order, each 4096-aligned
        config.json          the model's transformers configuration
        tokenizer.json ...   what the gateway needs to turn text into token ids and back

A segment is what gets one contiguous run of pages: each decoder layer, and the rest (embeddings,
final norm, head). Tensors keep their logical names and axes, so that later fusion and tensor
parallelism can cut them. `convert.py` writes packs, `weights.py` reads them.
"""

from pathlib import Path

import msgspec
import xxhash

from engine.errors import ChecksumMismatch, PackError

PACK_VERSION = 1
INDEX_NAME = "index.msgpack"
BLOB_NAME = "weights.bin"
SEGMENT_ALIGN = 4096
TENSOR_ALIGN = 256
CHUNK_BYTES = 8 << 20


class TensorEntry(msgspec.Struct, frozen=True):
    """One parameter or persistent buffer. `offset` is inside its segment, in bytes."""

    name: str
    segment: int
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


class Segment(msgspec.Struct, frozen=True):
    """A contiguous part of the blob. `offset` is in the blob; both align to SEGMENT_ALIGN."""

    name: str
    offset: int
    num_bytes: int


class Chunk(msgspec.Struct, frozen=True):
    """Checksum unit; `offset` is inside its segment; xxh3_64 of the bytes as written."""

    segment: int
    offset: int
    num_bytes: int
    xxh3: int


class KvGroup(msgspec.Struct, frozen=True):
    """Layers with one KV geometry. window 0: full attention. Widths are per KV head."""

    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0


class PackIndex(msgspec.Struct, frozen=True):
    """Everything about a pack but the bytes. `revision` names the source's content and dtype.

    `files` holds the xxh3_64 of every other file of the folder, by name.
    """

    version: int
    revision: str
    family: str
    architecture: str
    dtype: str
    vocab_size: int
    max_context: int
    total_bytes: int
    segments: tuple[Segment, ...]
    tensors: tuple[TensorEntry, ...]
    tied: dict[str, str]
    chunks: tuple[Chunk, ...]
    kv_groups: tuple[KvGroup, ...]
    kv_dtype: str
    files: dict[str, int] = {}


_CHECKSUM_BYTES = 8


def write_index(pack_dir: Path, index: PackIndex) -> None:
    """Write the index and its checksum; the caller syncs and renames the folder."""
    data = msgspec.msgpack.encode(index)
    checksum = xxhash.xxh3_64_intdigest(data).to_bytes(_CHECKSUM_BYTES, "big")
    (pack_dir / INDEX_NAME).write_bytes(data + checksum)


def read_index(pack_dir: Path) -> PackIndex:
    """Raises PackError where the folder holds no pack this version can read."""
    path = pack_dir / INDEX_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PackError(
            f"{pack_dir} holds no checkpoint pack ({error}): register the model again"
        ) from error
    data, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_intdigest(data).to_bytes(_CHECKSUM_BYTES, "big") != checksum:
        raise ChecksumMismatch(f"{path} is damaged: register the model again")
    try:
        index = msgspec.msgpack.decode(data, type=PackIndex)
    except msgspec.DecodeError as error:
        raise PackError(f"{path} cannot be read ({error}): register the model again") from error
    if index.version != PACK_VERSION:
        raise PackError(
            f"{path} has version {index.version}, this build reads {PACK_VERSION}: "
            "register the model again"
        )
    return index
