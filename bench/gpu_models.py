"""Packs for GPU benchmarks: true shapes with random weights, made in seconds and not in minutes.

A folder of a true shape with holes for weights is converted by the product's own code; then the
blob is filled with random numbers, a block of them over and over, each tensor at the scale that
keeps activations as they are, and its checksums are written anew. Codes of int8 and fp8 use all of
their range, and a row's scale is what makes its weights of that size. What a GPU computes with them
has the power and the speed of real weights, which zeros would not. `twins` are further packs over
the same bytes: other models to the engine, no further room on the disk.
"""

import os
import shutil
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash

from bench import shapes
from engine.pack import (
    BLOB_NAME,
    ROW_DTYPES,
    SCALE_SUFFIX,
    Chunk,
    PackIndex,
    TensorEntry,
    read_index,
    write_index,
)
from engine.registration import convert

SMALL = "Qwen/Qwen2.5-0.5B"
MEDIUM = "Qwen/Qwen3-1.7B"
LARGE = "meta-llama/Llama-3.1-8B"
MIXTURE = "Qwen/Qwen3-30B-A3B, 8 layers"
BLOCK_ELEMENTS = 4 << 20
# Of codes, in standard deviations: what lies beyond is cut.
LARGEST_CODE = 4.0
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
"""What a dry run makes of any shape."""
TINY_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
TINY_EXPERTS |= {"moe_intermediate_size": 64}

DERIVED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-1.7B": ("Qwen/Qwen3-0.6B", {"hidden_size": 2048, "intermediate_size": 6144}),
    MIXTURE: (
        "Qwen/Qwen3-30B-A3B, 4 layers of 64 experts",
        {"num_hidden_layers": 8, "num_experts": 128, "vocab_size": 151_936},
    ),
}
"""Shapes that differ from one of model_shapes.json in these."""


def shape_of(name: str, dry: bool) -> dict[str, Any]:
    """A shape by its public name; the same family in small for dry runs."""
    base, change = DERIVED.get(name, (name, {}))
    shape = {**shapes.read_shapes()[base], **change}
    if not dry:
        return shape
    shape.pop("rope_scaling", None)
    return {**shape, **TINY, **{key: TINY_EXPERTS[key] for key in TINY_EXPERTS if key in shape}}


def make_pack(
    name: str, work_dir: Path, dry: bool, seed: int = 0, dtype: convert.DtypeChoice = "auto"
) -> tuple[Path, PackIndex]:
    """The pack of a shape, made once; `dtype` not int4. Raises KeyError for a shape that is not
    known."""
    form = "" if dtype == "auto" else f"-{dtype}"
    label = f"{name.replace('/', '-')}{form}{'-tiny' if dry else ''}-{seed}"
    marker = work_dir / f"{label}.pack"
    if marker.exists():
        pack_dir = Path(marker.read_text(encoding="utf-8"))
        return pack_dir, read_index(pack_dir)
    folder = work_dir / label
    shapes.build({name: shape_of(name, dry)}, name, folder, seed=None)
    candidate = convert.inspect(folder)
    pack_dir, index = convert.write_pack(
        candidate, work_dir / f"packs-{seed}", dtype, lambda *_: None
    )
    shutil.rmtree(folder)
    index = _fill(pack_dir, index, seed)
    marker.write_text(str(pack_dir), encoding="utf-8")
    return pack_dir, index


def twins(pack_dir: Path, count: int) -> list[Path]:
    """`count` packs over the same blob, each with a revision of its own."""
    index, made = read_index(pack_dir), []
    for number in range(count):
        twin = pack_dir.with_name(f"{pack_dir.name}-twin{number}")
        if not twin.exists():
            shutil.copytree(pack_dir, twin, ignore=shutil.ignore_patterns(BLOB_NAME))
            os.link(pack_dir / BLOB_NAME, twin / BLOB_NAME)
            fields: dict[str, Any] = {n: getattr(index, n) for n in index.__struct_fields__}
            revision = f"{number:04x}{index.revision[4:]}"
            write_index(twin, PackIndex(**fields | {"revision": revision}))
        made.append(twin)
    return made


def step_weight_bytes(index: PackIndex, of_experts: float = 1.0) -> int:
    """What a decode step reads of the weights: all but the embeddings, unless they are the head;
    of experts' this share."""
    tied = set(index.tied.values())
    return sum(
        int(entry.num_bytes * (of_experts if ".experts." in entry.name else 1.0))
        for entry in index.tensors
        if "embed_tokens" not in entry.name or entry.name in tied
    )


def share_of_experts(name: str, batch: int, dry: bool) -> float:
    """How many of a shape's experts a step of so many tokens hits, if all are chosen alike."""
    shape = shape_of(name, dry)
    if "num_experts" not in shape:
        return 1.0
    missed = 1 - shape["num_experts_per_tok"] / shape["num_experts"]
    return float(1 - missed**batch)


def kv_bytes_per_token(index: PackIndex) -> int:
    """Of all layers."""
    itemsize: int = getattr(torch, index.kv_dtype).itemsize
    return sum(group.values_per_token * itemsize for group in index.kv_groups)


def prompt_flops(name: str, index: PackIndex, length: int, dry: bool) -> float:
    """Operations of one prompt: the layers' products for each token, the head for one, attention.

    Of attention what a causal mask leaves: half of its two products.
    """
    shape = shape_of(name, dry)
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // heads
    head = shape["vocab_size"] * shape["hidden_size"]
    layers = step_weight_bytes(index) // 2 - head
    attention = shape["num_hidden_layers"] * heads * head_dim * 2 * length * (length + 1)
    return float(2 * layers * length + 2 * head + attention)


def _fill(pack_dir: Path, index: PackIndex, seed: int) -> PackIndex:
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(BLOCK_ELEMENTS, generator=generator)
    entries = {entry.name: entry for entry in index.tensors}
    chunks = []
    # Written and read by calls: through a mapping each 4 KiB of 16 GB would be a page fault. Not
    # synchronised: readers find it in the page cache, and what a crash leaves fails its checksums.
    with (pack_dir / BLOB_NAME).open("r+b", buffering=0) as blob:
        for entry in index.tensors:
            part = _random(entry, entries, block).view(torch.uint8).numpy().data
            blob.seek(index.segments[entry.segment].offset + entry.offset)
            for done in range(0, entry.num_bytes, len(part)):
                _write_all(blob, part[: entry.num_bytes - done])
        for chunk in index.chunks:
            blob.seek(index.segments[chunk.segment].offset + chunk.offset)
            digest = xxhash.xxh3_64_intdigest(_read_all(blob, chunk.num_bytes))
            chunks.append(Chunk(chunk.segment, chunk.offset, chunk.num_bytes, digest))
    fields: dict[str, Any] = {name: getattr(index, name) for name in index.__struct_fields__}
    filled = PackIndex(**fields | {"chunks": tuple(chunks)})
    write_index(pack_dir, filled)
    return filled


def _random(
    entry: TensorEntry, entries: Mapping[str, TensorEntry], block: torch.Tensor
) -> torch.Tensor:
    """What a tensor is filled with, again and again. `block`: normal numbers."""
    dtype = getattr(torch, entry.dtype)
    some = block[: entry.num_bytes // dtype.itemsize]
    if entry.scheme in ROW_DTYPES:
        codes = some.clamp(-LARGEST_CODE, LARGEST_CODE) * _code_std(entry)
        return (codes if dtype.is_floating_point else codes.round()).to(dtype)
    if entry.scheme:
        raise ValueError(f"{entry.name} is kept as {entry.scheme}")
    weight = entries.get(entry.name.removesuffix(SCALE_SUFFIX), entry)
    if weight is not entry:
        size = weight.shape[-1] ** -0.5 / _code_std(weight)
        return torch.full_like(some, size, dtype=dtype)
    scale = shapes.NORM_STD if len(entry.shape) < 2 else entry.shape[-1] ** -0.5
    centre = 1.0 if entry.name.endswith("norm.weight") else 0.0
    return (some * scale + centre).to(dtype)


def _code_std(entry: TensorEntry) -> float:
    """Of a weight's codes: the largest is the type's largest, and none of e4m3 is NaN."""
    dtype = getattr(torch, entry.dtype)
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    return float(most) / LARGEST_CODE


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _read_all(file: FileIO, num_bytes: int) -> memoryview:
    found = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes:
        count = file.readinto(found[done:])
        if not count:
            raise EOFError("the blob ends early")
        done += count
    return found
