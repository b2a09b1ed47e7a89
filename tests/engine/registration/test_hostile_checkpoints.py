"""Hostile checkpoints of every kind: refused with a reason, in bounded memory, and nothing is left.

First through the process that registers, as the admin starts it; then many more in this process.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from engine.errors import RegistrationRefused
from engine.pack import BLOB_NAME
from engine.registration.convert import inspect, write_pack
from engine.registration.staging import staged
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.gguf_kit import text, value, write_model
from tests.engine.registration.hostile_kit import (
    FILES,
    UP,
    WEIGHTS,
    Damage,
    array,
    entry,
    gguf,
    in_weights,
    says,
    split,
)
from tests.engine.registration.quantized_kit import KINDS, write_checkpoint
from tests.engine.registration.test_convert import FAMILIES
from tests.engine.registration.test_gguf_folder import MODELS

GGUF = "gguf"
BLOBS = 64 << 20
ADVICE = ("supported", "download", "use ", "register", "remove ", "put ", "correct ")
CODES = {"bad_weights", "quantized_weights", "bad_config", "unknown_family"}


def _put(name: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return in_weights(lambda w: w.update({f"{UP}.{name}": tensor(w[f"{UP}.{name}"])}))


def _add(name: str, tensor: torch.Tensor) -> Damage:
    return in_weights(lambda w: w.update({f"{UP}.{name}": tensor}))


def _config(**fields: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | fields))

    return damage


def _groups(count: int) -> dict[str, Any]:
    sizes = range(1 << 14, (1 << 14) + count)
    return {str(k): {"weights": {"num_bits": 4, "type": "int", "group_size": k}} for k in sizes}


def _file(content: bytes) -> Damage:
    return lambda folder: (folder / "model-Q8_0.gguf").write_bytes(content)


def _cut(place: Callable[[int], int]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model-Q8_0.gguf"
        path.write_bytes(path.read_bytes()[: place(path.stat().st_size)])

    return damage


def _sparse_experts(folder: Path) -> None:
    """A thousand tensors of 4,096 experts of one value each: names without end in a small file."""
    entries = [
        entry(f"blk.{number}.ffn_up_exps.weight", (1, 1, 4096), at=number << 14)
        for number in range(1000)
    ]
    (folder / "model-Q8_0.gguf").write_bytes(gguf(*entries, body=1000 << 14))
    MODELS["llama"].save_pretrained(folder)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))


IN_PROCESS: tuple[str, ...] = (
    "empty",
    "cut in the header",
    "cut in the last tensor",
    "one over another",
    "a shape without end",
    "tensors without end",
    "twice",
    "a list",
)
# Where: which kind of checkpoint, and what is done to it.
HOSTILE: dict[str, tuple[str, Damage]] = {
    **{f"file: {name}": ("fp8 blocks", FILES[name]) for name in IN_PROCESS},
    "scales for each weight": (
        "fp8 blocks",
        _put("weight_scale_inv", lambda s: torch.ones(96, 64)),
    ),
    "scales without end": (
        "fp8 channels",
        _put("weight_scale", lambda s: torch.ones(BLOBS // 4)),
    ),
    "a scale of NaN": ("fp8 modelopt", _put("weight_scale", lambda s: s * torch.nan)),
    "a scale of zero": ("nvfp4", _put("weight_global_scale", lambda s: s * 0)),
    "an index beyond": (
        "int4 asymmetric, ordered",
        _put("weight_g_idx", lambda index: index + (1 << 30)),
    ),
    "an index below": ("gptq v2, ordered", _put("g_idx", lambda index: index - 2)),
    "a shape below zero": ("int4", _put("weight_shape", lambda s: -s)),
    "a shape beyond": ("int8 packed", _put("weight_shape", lambda s: s << 40)),
    "a weight that is large": ("gptq", _put("qweight", lambda w: w.repeat(1 << 12, 1))),
    "zeros that are large": ("awq", _put("qzeros", lambda w: w.repeat(1 << 12, 1))),
    "a bias that is large": ("gptq", _put("bias", lambda b: torch.zeros(BLOBS))),
    "a layout that is large": (
        "bitsandbytes int8",
        _put("weight_format", lambda w: torch.zeros(4 * BLOBS, dtype=torch.uint8)),
    ),
    "a table that is large": ("nf4", _put("weight.quant_map", lambda m: m.repeat(1 << 18))),
    "exponents of none": ("mxfp4", _put("weight_scale", lambda s: s * 0 + 255)),
    "a factor of inputs": ("nvfp4 modelopt", _add("pre_quant_scale", torch.ones(64))),
    "a block below zero": ("fp8 blocks", says(weight_block_size=[-128, 128])),
    "a block beyond": ("fp8 blocks", says(weight_block_size=[10**30, 10**30])),
    "bits below zero": ("gptq", says(bits=-4)),
    "bits beyond": ("gptq", says(bits=10**300)),
    "a group beyond": ("awq", says(group_size=1 << 40)),
    "groups without end": ("int4", says(config_groups=_groups(20_000))),
    "a layer of another kind": ("mixed modelopt", says(quantized_layers={"x": {}})),
    "a method of half a letter": ("gptq", says(quant_method="\ud800")),
    "a class of half a letter": ("gptq", _config(architectures=["\ud800"])),
    "gguf: empty": (GGUF, _cut(lambda size: 0)),
    "gguf: cut in the metadata": (GGUF, _cut(lambda size: 300)),
    "gguf: cut in the tensors": (GGUF, _cut(lambda size: size - 40)),
    "gguf: tensors without end": (GGUF, _file(gguf(entry(), tensors=10**7))),
    "gguf: keys without end": (GGUF, _file(gguf(entry(), num_keys=1 << 62))),
    "gguf: a text without end": (
        GGUF,
        _file(gguf(entry(), keys=(text("x") + b"\x08\0\0\0" + b"\xff" * 8,))),
    ),
    "gguf: an array without end": (GGUF, _file(gguf(entry(), keys=(array(8, 1 << 60),)))),
    "gguf: arrays that are many": (
        GGUF,
        _file(
            gguf(entry(), keys=tuple(array(0, 1 << 20, bytes(1 << 20), f"x{i}") for i in range(5)))
        ),
    ),
    "gguf: a key twice": (GGUF, _file(gguf(entry(), keys=(text("x") + value(1),) * 2))),
    "gguf: alignment beyond": (
        GGUF,
        _file(gguf(entry(), keys=(text("general.alignment") + value(1 << 31),))),
    ),
    "gguf: values without end": (GGUF, _file(gguf(entry(shape=(1 << 40, 1 << 40))))),
    "gguf: experts without end": (GGUF, _sparse_experts),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Copies a good checkpoint of a kind to a folder."""
    kept = tmp_path_factory.mktemp("whole")

    def copy(kind: str, folder: Path) -> Path:
        place = kept / kind.replace(" ", "-")
        if not place.exists():
            if kind == GGUF:
                write_model(place, "llama", MODELS["llama"])
            else:
                write_checkpoint(place, KINDS[kind])
        shutil.copytree(place, folder)
        return folder

    return copy


def peak_bytes(pid: int) -> int:
    """The most that the process has had in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def test_the_process_refuses_all_of_them(
    tmp_path: Path, whole: Callable[[str, Path], Path]
) -> None:
    arguments, names = ["--dest", str(tmp_path / "packs")], {}
    for number, (name, (kind, damage)) in enumerate(HOSTILE.items()):
        folder = whole(kind, tmp_path / f"{number}")
        damage(folder)
        names[str(folder)] = name
        arguments += ["--source", str(folder)]
    command = [sys.executable, "-m", "engine.registration.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        begin, found, peaks = 0, {}, {}
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "preflight" and not begin:
                begin = peak_bytes(process.pid)
            if event["event"] != "progress" and event["event"] != "preflight":
                found[names[event["source"]]] = event
                peaks[names[event["source"]]] = peak_bytes(process.pid)
        noise = process.stderr.read().decode()
    assert found.keys() == set(names.values()), noise[-2000:]
    for name, event in found.items():
        assert event["event"] == "refused", (name, event)
        assert event["code"] in CODES, (name, event)
        assert len(event["message"]) < 2000, name
        assert ".tmp-" not in event["message"], name
        assert any(word in event["message"] for word in ADVICE), (name, event)
    assert process.returncode == 1
    assert not (tmp_path / "packs").exists()
    # The largest file alone is 256 MiB, and a header of 600,000 tensors would take 700.
    # The most is 131,072 experts by name, 170 MiB.
    assert max(peaks.values()) - begin < 192 << 20, peaks


def outcome(folder: Path, dest: Path, dtype: Any = "bfloat16") -> tuple[str, bytes]:
    """Refused with a code, or what the pack's weights are; nothing else comes out, or stays."""
    try:
        with staged(folder, dest) as stage:
            made, _ = write_pack(inspect(stage), dest, dtype, lambda *_: None)
    except RegistrationRefused as error:
        refusal = error
    else:
        content = (made / BLOB_NAME).read_bytes()
        shutil.rmtree(dest)
        return "", content
    assert len(str(refusal)) > 30
    assert not dest.exists()
    return refusal.code, b""


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused(
    tmp_path: Path, whole: Callable[[str, Path], Path], name: str
) -> None:
    folder = whole("nvfp4", tmp_path / "model")
    FILES[name](folder)
    assert outcome(folder, tmp_path / "packs") == ("bad_weights", b"")


SHAPED: tuple[str, ...] = (
    "fp8 blocks",
    "int4 asymmetric, ordered",
    "int8",
    "nvfp4",
    "mxfp4 gpt-oss",
    "awq",
    "gptq v2, ordered",
    "nf4 nested",
    "bitsandbytes int8",
)


@pytest.mark.parametrize("kind", SHAPED)
def test_a_tensor_of_another_shape_is_refused_or_the_same(
    tmp_path: Path, whole: Callable[[str, Path], Path], kind: str
) -> None:
    good = whole(kind, tmp_path / "good")
    _, wanted = outcome(good, tmp_path / "packs")
    header, body = split(good / WEIGHTS)
    names = [name for name in header if "up_proj" in name]
    refused = 0
    for name in names:
        shape, number = header[name]["shape"], torch.Size(header[name]["shape"]).numel()
        for other in ([number], [1, number], [number, 1], shape[::-1], [*shape, 1]):
            if other == shape:
                continue
            changed = header | {name: header[name] | {"shape": other}}
            raw = json.dumps(changed).encode()
            (good / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + body)
            code, content = outcome(good, tmp_path / "packs")
            assert code or content == wanted, (name, other)
            refused += bool(code)
    assert refused > 5


def test_experts_larger_than_the_model_are_not_read(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", FAMILIES["mixtral"]())
    weights = load_file(folder / WEIGHTS)
    name = next(name for name in weights if ".experts.1.w1." in name)
    weights[name] = torch.zeros(1 << 20)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(RegistrationRefused, match="more values than the whole model") as caught:
        write_pack(inspect(folder), tmp_path / "packs", "auto", lambda *_: None)
    assert caught.value.code == "bad_weights"


def flipped(content: bytes, end: int, generator: random.Random) -> bytes:
    """One to four bytes before `end` are others, half of them digits and brackets."""
    changed = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(min(end, len(changed)))
        changed[place] = generator.choice((generator.randrange(256), *b'0159-,.]}[{"e'))
    return bytes(changed)


def fuzz(folder: Path, dest: Path, kind: str, seeds: range) -> int:
    """How many were refused."""
    path = folder / ("model-Q8_0.gguf" if kind == GGUF else WEIGHTS)
    content = path.read_bytes()
    small = (folder / "config.json").read_bytes() if kind != GGUF else b""
    refused = 0
    for seed in seeds:
        generator = random.Random(seed)
        if small and seed % 4 == 3:
            said = flipped(small[small.index(b"quantization_config") :], 200, generator)
            begin = small[: small.index(b"quantization_config")]
            (folder / "config.json").write_bytes(begin + said)
        else:
            end = content.find(b"\0" * 32, 2000) if kind == GGUF else 0
            end = end if kind == GGUF else 8 + int.from_bytes(content[:8], "little")
            path.write_bytes(flipped(content, max(end, 400), generator))
        code, _ = outcome(folder, dest)
        refused += bool(code)
        path.write_bytes(content)
        if small:
            (folder / "config.json").write_bytes(small)
    return refused


@pytest.mark.parametrize("kind", ["fp8 blocks", "int4", "gptq", "nf4 nested", "nvfp4", GGUF])
def test_flipped_bytes_are_refused_or_read(
    tmp_path: Path, whole: Callable[[str, Path], Path], kind: str
) -> None:
    folder = whole(kind, tmp_path / "model")
    assert fuzz(folder, tmp_path / "packs", kind, range(30)) > 10


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*KINDS, GGUF])
def test_many_flipped_bytes_are_refused_or_read(
    tmp_path: Path, whole: Callable[[str, Path], Path], kind: str
) -> None:
    folder = whole(kind, tmp_path / "model")
    count = int(os.environ.get("FUZZ_SEEDS", "1000"))
    assert fuzz(folder, tmp_path / "packs", kind, range(100, 100 + count)) > count // 3
