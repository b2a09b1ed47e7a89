"""Checkpoints that nobody wrote in good faith: damage to files, headers and what is said of them.

Each damage is a function of a folder that was whole. What comes of it is not judged here.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.engine.pack_rig import edit_json
from tests.engine.registration.gguf_kit import text, value

Damage = Callable[[Path], object]
Header = dict[str, Any]
WEIGHTS = "model.safetensors"
UP = "model.layers.0.mlp.up_proj"


def split(path: Path) -> tuple[Header, bytes]:
    """The header of a safetensors file, and what lies behind it."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def join(path: Path, header: Header | bytes, body: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def in_header(edit: Callable[[Header], object]) -> Damage:
    def damage(folder: Path) -> None:
        header, body = split(folder / WEIGHTS)
        edit(header)
        join(folder / WEIGHTS, header, body)

    return damage


def in_weights(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """The tensors are others, and the file is a whole one."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        edit(weights)
        kept = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def says(**fields: Any) -> Damage:
    """`quantization_config` has these, too."""

    def edit(config: dict[str, Any]) -> None:
        config["quantization_config"].update(fields)

    return lambda folder: edit_json(folder / "config.json", edit)


def cut(place: Callable[[int, int], int]) -> Damage:
    """`place`: of the header's end and the file's, where it ends instead."""

    def damage(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        (folder / WEIGHTS).write_bytes(content[: place(end, len(content))])

    return damage


def raw(make: Callable[[bytes], bytes]) -> Damage:
    """The header is another text."""

    def damage(folder: Path) -> None:
        header, body = split(folder / WEIGHTS)
        join(folder / WEIGHTS, make(json.dumps(header).encode()), body)

    return damage


def many(count: int) -> bytes:
    """A header of empty tensors."""
    entry = b'"x%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return b"{" + b",".join(entry % number for number in range(count)) + b"}"


def _length(number: int) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(number.to_bytes(8, "little") + content[8:])

    return damage


def _second(**fields: Any) -> Damage:
    """Of the file's second tensor."""

    def edit(header: Header) -> None:
        names = sorted(header.keys() - {"__metadata__"}, key=lambda n: header[n]["data_offsets"])
        header[names[1]].update({k: v(header[names[0]]) for k, v in fields.items()})

    return in_header(edit)


def _as_a_list(header: Header) -> None:
    name = next(iter(header.keys() - {"__metadata__"}))
    header[name] = [header[name][key] for key in ("dtype", "shape", "data_offsets")]


FILES: dict[str, Damage] = {
    "empty": cut(lambda end, size: 0),
    "cut in the length": cut(lambda end, size: 5),
    "cut in the header": cut(lambda end, size: end // 2),
    "cut behind the header": cut(lambda end, size: end),
    "cut in the first tensor": cut(lambda end, size: end + 3),
    "cut in the last tensor": cut(lambda end, size: size - 1),
    "a length without end": _length((1 << 64) - 1),
    "a length of nothing": _length(0),
    "one over another": _second(data_offsets=lambda first: first["data_offsets"]),
    "backwards": _second(data_offsets=lambda first: first["data_offsets"][::-1]),
    "below zero": _second(data_offsets=lambda first: [-8, 8]),
    "places without end": _second(data_offsets=lambda first: [1 << 62, (1 << 62) + 8]),
    "a shape without end": _second(shape=lambda first: [1 << 62, 1 << 62]),
    "a shape of fractions": _second(shape=lambda first: [1.5]),
    "a shape of none": _second(shape=lambda first: None),
    "a type of none": _second(dtype=lambda first: 7),
    "an unknown type": _second(dtype=lambda first: "Q9"),
    "tensors without end": raw(lambda header: many(600_000)),
    "depth without end": raw(lambda header: b'{"x":' + b"[" * 300_000),
    "twice": raw(lambda header: header[:-1] + b"," + header[header.index(b'"model.') :]),
    "a list": in_header(_as_a_list),
    "no text": raw(lambda header: b'{"\xff":' + header[1:]),
    "half a letter": raw(lambda header: b'{"\\ud800":1,' + header[1:]),
}
"""Of a safetensors file, whatever is in it."""


def gguf(
    *entries: bytes,
    keys: tuple[bytes, ...] = (),
    tensors: int | None = None,
    num_keys: int | None = None,
    body: int = 64,
) -> bytes:
    """A file of version 3 that says of itself what it is told to."""
    said = (text("general.architecture") + value("llama"), *keys)
    counts = (
        len(entries) if tensors is None else tensors,
        len(said) if num_keys is None else num_keys,
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join((*said, *entries))
    return head + b"\0" * (-len(head) % 32 + body)


def entry(name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, at: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + axes + struct.pack("<IQ", kind, at)


def array(kind: int, count: int, content: bytes = b"", name: str = "x") -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, count) + content
