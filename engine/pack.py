"""Checkpoint packs: what a pack folder holds and how its index reads. Schema only.

    <pack_dir>/
        index.msgpack        PackIndex and its xxh3_64; written last: a folder without it is no pack
        weights.bin          one blob in arena layout: segments in order, each 4096-aligned
        config.json          the model's transformers configuration
        tokenizer.json ...   what the gateway needs to turn text into token ids and back

A segment is what gets one contiguous run of pages: each decoder layer, and the rest (embeddings,
final norm, head). Tensors keep their logical names and shard axes, so that tensor parallelism can
cut them; those that one product may take together are neighbours (`registration/layout.py`).
`engine/registration/` writes packs, `engine/packs/weights.py` reads them.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import xxhash

from engine.errors import ChecksumMismatch, PackError
from engine.protocol import PACK_VERSION

INDEX_NAME = "index.msgpack"
BLOB_NAME = "weights.bin"
SEGMENT_ALIGN = 4096
TENSOR_ALIGN = 256
# Of what may follow another in a fused group, so that small tensors leave no gaps: a vector load.
MEMBER_ALIGN = 16
CHUNK_BYTES = 8 << 20
INT8_SCHEME = "int8_rows"
FP8_SCHEME = "fp8_rows"
# What a weight is kept as, where its rows have scales.
ROW_DTYPES = {INT8_SCHEME: "int8", FP8_SCHEME: "float8_e4m3fn"}
SCALE_SUFFIX = "_scale"

Task: TypeAlias = Literal["generate", "embed", "classify"]
Schemes: TypeAlias = Mapping[str, str]
"""Name of a weight -> how it is kept (`TensorEntry.scheme`)."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One parameter or persistent buffer. `offset` is inside its segment, in bytes.

    shard_axis   where tensor parallelism cuts it; None: every device has all of it
    parts        sizes along that axis where it holds several projections, to be cut each by itself
    scheme       "int8_rows": int8, its scales are the entry `<name>_scale`; "fp8_rows": e4m3, its
                 scales are the same entry in float32; a form of kernels/int4_blocks.py: its blocks,
                 scales among them; "": as it is
    """

    name: str
    segment: int
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None
    parts: tuple[int, ...] = ()
    scheme: str = ""


class FusedGroup(msgspec.Struct, frozen=True):
    """Tensors that lie directly behind one another: together one tensor, joined along `axis`."""

    name: str
    members: tuple[str, ...]
    axis: int = 0


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


_INDEXERS = 1 << 16


def indexer_layer(layer: int) -> int:
    """The number, among the layers of KV, of the keys that the indexer of a layer keeps: a layer of
    their own, of one head and of K alone (engine/modules/indexers.py)."""
    return _INDEXERS + layer


def is_indexer(layer: int) -> bool:
    """Whether it is such a number."""
    return layer >= _INDEXERS


class KvGroup(msgspec.Struct, frozen=True):
    """Layers with one KV geometry. window and chunk 0: full attention. Widths are per KV head.
    Keys of indexers are layers too, with numbers of their own (`indexer_layer`).

    v_in_k    V is the first v_dim values of K (layers that cache latents): K alone is kept
    chunk     positions are cut into chunks of so many, and a query sees only its own one's
    readers   (layer, its source) of layers without KV of their own: they read a source's, which is
              one of `layers`
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    v_in_k: bool = False
    chunk: int = 0
    readers: tuple[tuple[int, int], ...] = ()

    @property
    def values_per_token(self) -> int:
        """Kept of one position in all its layers."""
        row = self.k_dim if self.v_in_k else self.k_dim + self.v_dim
        return len(self.layers) * self.num_kv_heads * row


StateKey: TypeAlias = tuple[int, str]
"""A layer and which of its states: "conv" or "recurrent", with a number behind further ones."""


class StateGroup(msgspec.Struct, frozen=True):
    """States of one shape, one a sequence: what recurrent and convolutional layers keep."""

    states: tuple[StateKey, ...]
    shape: tuple[int, ...]
    dtype: str


class EncoderRecord(msgspec.Struct, frozen=True):
    """What an encoder's rows are.

    pooling      of an input's hidden states: "cls", "mean", "max", "last", "mean_sqrt_len",
                 "weighted_mean", or several of these with "+" between, side by side
    normalize    whether the pooled vector is brought to length 1
    dim          width of a row: of the pooled vector, or the number of labels
    labels       a classifier's, in the order of their ids
    multi_label  whether its labels do not exclude each other
    segments     kinds of segment that the model tells apart; up to 1: type ids mean nothing to it
    """

    pooling: str
    normalize: bool
    dim: int
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    segments: int = 0


class PackIndex(msgspec.Struct, frozen=True):
    """Everything about a pack but the bytes. `revision` names the source's content and dtype.

    `files` holds the xxh3_64 of every other file of the folder, by name. `encoder` is there unless
    the task is "generate"; such a pack has no `kv_groups` and no `states`, and `max_context` is its
    longest input.
    `dtype` is what is computed in, `quantization` ("int8", "fp8", "int4", "") how linears are
    kept.
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
    task: Task = "generate"
    encoder: EncoderRecord | None = None
    quantization: str = ""
    fused: tuple[FusedGroup, ...] = ()
    states: tuple[StateGroup, ...] = ()


def is_one_run(group: FusedGroup, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether the members lie behind one another without a gap, as one tensor along axis 0."""
    members = [entries[name] for name in group.members if name in entries]
    if len(members) < max(2, len(group.members)) or group.axis != 0:
        return False
    return all(
        after.segment == before.segment
        and after.offset == before.offset + before.num_bytes
        and (after.dtype, after.scheme) == (before.dtype, before.scheme)
        and after.shape[1:] == before.shape[1:]
        for before, after in pairwise(members)
    )


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
            f"there is no pack in {pack_dir} ({error}): register the model again"
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
            "register the model again (`polyhost models update NAME`)"
        )
    return index


def schemes_in(index: PackIndex) -> Schemes:
    """Of a pack's weights, by all their names."""
    found = {entry.name: entry.scheme for entry in index.tensors if entry.scheme}
    shared = {name: found[holder] for name, holder in index.tied.items() if holder in found}
    return found | shared
