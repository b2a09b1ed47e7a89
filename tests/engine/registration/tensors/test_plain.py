"""A model in each published format becomes the pack of the weights that it stands for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Phi3Config

from engine.pack import BLOB_NAME, SCALE_SUFFIX
from engine.registration.convert import inspect, write_pack
from engine.registration.download import SMALL_NAMES
from engine.registration.source import declared_of, weight_files
from engine.registration.tensors import files as files_module
from engine.registration.tensors import open_tensors
from engine.registration.tensors import plain as plain_module
from engine.registration.tensors.plain import LEFT_OUT, PlainTensors
from kernels import int4_blocks
from kernels.int4_blocks import E2M1, E2M1_HALVES, FP4, INT4_BLOCKS, NF4, ZEROS
from tests.engine.pack_rig import edit_json
from tests.engine.registration.quantized_kit import (
    FP8,
    KINDS,
    SHAPE,
    Kind,
    awq,
    compressed,
    gptq,
    integers,
    nf4,
    write_checkpoint,
)
from tests.engine.registration.test_convert import convert, refusal, tensors_of


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_is_read_as_what_it_stands_for(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    twin = write_checkpoint(folder, KINDS[name])
    expected = load_file(twin / "model.safetensors")
    with open_tensors(weight_files(folder), declared_of(folder)) as source:
        biases = {key for key in source.shapes if source.adds_nothing(key)}
        assert source.shapes.keys() - biases == expected.keys()
        assert len(biases) == (7 if "gptq" in name else 0)
        in_pieces = 0
        for key, values in expected.items():
            pieces = list(source.pieces(key, 3000))
            in_pieces += len(pieces) > 1
            assert source.shapes[key] == tuple(values.shape), key
            assert torch.equal(torch.cat(pieces).to(torch.float32), values), key
            half = source.read(key).to(torch.bfloat16)
            assert torch.equal(half, values.to(torch.bfloat16)), key
        assert in_pieces > 2


@pytest.mark.parametrize("name", KINDS)
def test_its_pack_is_that_of_its_plain_twin(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainTensors.pieces, "__defaults__", (6500,))
    twin = write_checkpoint(tmp_path / "model", KINDS[name])
    # Codes of four bits are kept in int4, and not searched for (below).
    in_bytes = name.startswith(("fp8", "int8", "bitsandbytes", "gptq of 8"))
    for dtype in ("bfloat16", "int4" if in_bytes else "int8"):
        made, index = convert(tmp_path / "model", tmp_path / "packs", dtype)
        plain, wanted = convert(twin, tmp_path / "packs", dtype)
        assert made != plain
        assert index.tensors == wanted.tensors
        assert (made / BLOB_NAME).read_bytes() == (plain / BLOB_NAME).read_bytes()
        assert "quantization_config" not in (made / "config.json").read_text()


def test_auto_is_bfloat16_and_nothing_is_rounded_twice(tmp_path: Path) -> None:
    twin = write_checkpoint(tmp_path / "model", KINDS["gptq"])
    _, index = convert(tmp_path / "model", tmp_path / "packs", "auto")
    assert index.dtype == "bfloat16"
    made, index = convert(tmp_path / "model", tmp_path / "packs", "float32")
    plain, _ = write_pack(inspect(twin), tmp_path / "packs", "float32", lambda *_: None)
    assert index.dtype == "float32"
    assert (made / BLOB_NAME).read_bytes() == (plain / BLOB_NAME).read_bytes()


WIDE = SHAPE | {"hidden_size": 128, "intermediate_size": 256}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
NF4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SCALES = 0.0025
"""Float16 or float32 in the files, bfloat16 in ours."""
KEPT: dict[str, tuple[Kind, str, float]] = {
    "groups of 64": (
        Kind(compressed("pack-quantized", **INT4, group_size=64), integers(64, 4)),
        INT4_BLOCKS,
        0.0,
    ),
    "groups of 128": (
        Kind(compressed("pack-quantized", **INT4, group_size=128), integers(128, 4)),
        INT4_BLOCKS,
        0.0,
    ),
    "channels": (
        Kind(compressed("pack-quantized", num_bits=4, type="int"), integers(0, 4)),
        INT4_BLOCKS,
        0.0,
    ),
    "with zeros": (
        Kind(
            compressed("pack-quantized", **INT4, group_size=32, symmetric=False),
            integers(32, 4, symmetric=False),
        ),
        ZEROS,
        0.0,
    ),
    "gptq": (
        Kind(GPTQ | {"sym": True}, gptq(4, 128, first_version=True, symmetric=True)),
        INT4_BLOCKS,
        SCALES,
    ),
    "gptq with zeros": (Kind(GPTQ, gptq(4, 128, first_version=True)), ZEROS, SCALES),
    "awq": (Kind({"quant_method": "awq", "bits": 4, "group_size": 128}, awq(128)), ZEROS, SCALES),
    "mxfp4": (KINDS["mxfp4"], E2M1, 0.0),
    "nvfp4": (KINDS["nvfp4"], E2M1_HALVES, SCALES),
    "nvfp4 modelopt": (KINDS["nvfp4 modelopt"], E2M1_HALVES, SCALES),
    # Whose tables have no whole numbers: 0.7 % and 0.4 % of their values.
    "nf4": (Kind(NF4_BITS, nf4(False)), NF4, 0.012),
    "nf4 nested": (Kind(NF4_BITS, nf4(True)), NF4, 0.012),
    "fp4": (Kind(NF4_BITS, nf4(False, kind="fp4")), FP4, 0.008),
}


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("fp8")])
def test_codes_of_fp8_are_kept_in_fp8(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for blocks; a scale for all is that of each row, though no row but one has code 448."""
    monkeypatch.setattr(PlainTensors.pieces, "__defaults__", (6500,))
    write_checkpoint(tmp_path / "model", KINDS[name])
    made, index = convert(tmp_path / "model", tmp_path / "packs", "fp8")
    tensors, source = tensors_of(made, index), load_file(tmp_path / "model" / "model.safetensors")
    codes = {key: codes for key, codes in source.items() if codes.dtype == FP8}
    assert len(codes) == 7
    for key, wanted in codes.items():
        same = torch.equal(tensors[key].view(torch.uint8), wanted.view(torch.uint8))
        assert same == (name != "fp8 blocks"), key
        if same:
            found = next(s for s in ("_scale", "_scale_inv") if key + s in source)
            scales = source[key + found].float().flatten().expand(len(wanted))
            assert torch.equal(tensors[key + SCALE_SUFFIX], scales), key


@pytest.mark.parametrize("name", KEPT)
def test_codes_of_four_bits_are_kept_in_int4(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainTensors.pieces, "__defaults__", (20_000,))
    kind, scheme, allowed = KEPT[name]
    kind = replace(kind, model=lambda: LlamaConfig(**WIDE))
    twin = write_checkpoint(tmp_path / "model", kind)
    wanted = load_file(twin / "model.safetensors")
    errors: list[list[float]] = []
    for folder in (tmp_path / "model", twin):
        made, index = convert(folder, tmp_path / "packs", "int4")
        tensors = tensors_of(made, index)
        chosen = [e for e in index.tensors if e.scheme in int4_blocks.FORMS]
        assert len(chosen) == 7
        assert {e.scheme for e in chosen} == {INT4_BLOCKS if folder == twin else scheme}
        # Whatever the form, projections of one input are one product.
        assert len([group for group in index.fused if group.name.endswith(".weight")]) == 2
        errors.append([])
        for entry in chosen:
            key = entry.name
            values = int4_blocks.dequantize(tensors[key], wanted[key].shape[1], entry.scheme)
            off = (values - wanted[key]).norm() / wanted[key].norm()
            errors[-1].append(float(off))
    kept, searched = errors
    assert max(kept) <= allowed
    assert min(searched) > 0.01  # what a second rounding would be


FUSED = ("fp8 blocks", "fp8 modelopt", "fp8 channels", "int4", "gptq v2, ordered", "awq", "nvfp4")


@pytest.mark.parametrize("name", FUSED)
def test_projections_that_the_model_joins_have_scales_of_the_joint_weight(
    tmp_path: Path, name: str
) -> None:
    kind = replace(KINDS[name], model=lambda: Phi3Config(**SHAPE), extra={})
    twin = write_checkpoint(tmp_path / "model", kind)
    assert "qkv_proj" in str(load_file(twin / "model.safetensors").keys())
    made, _ = convert(tmp_path / "model", tmp_path / "packs", "bfloat16")
    plain, _ = convert(twin, tmp_path / "packs", "bfloat16")
    assert made != plain
    assert (made / BLOB_NAME).read_bytes() == (plain / BLOB_NAME).read_bytes()


def test_a_head_that_is_quantized_is_no_longer_its_embedding(tmp_path: Path) -> None:
    kind = replace(
        KINDS["fp8 tensor"], model=lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True)
    )
    write_checkpoint(tmp_path / "model", kind)
    embedding = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    tensors, values = kind.write(embedding)
    head = {f"lm_head.{ending}": tensor for ending, tensor in tensors.items()}
    _weights(lambda weights: weights.update(head))(tmp_path / "model")
    made, index = convert(tmp_path / "model", tmp_path / "packs", "float32")
    assert not index.tied
    found = tensors_of(made, index)
    assert torch.equal(found["lm_head.weight"], values)
    assert torch.equal(found["model.embed_tokens.weight"], embedding)


# As tools write them: transformers (fp8, its experts), compressed-tensors (activations, caches,
# attention in NVFP4), ModelOpt and vLLM.
PUBLISHED = (
    "self_attn.q_proj.input_scale",
    "self_attn.k_proj.input_scale_ub",
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.qkv_proj.k_scale",
    "self_attn.k_proj.output_scale",
    "self_attn.k_proj.output_zero_point",
    "self_attn.k_scale",
    "self_attn.k_zero_point",
    "self_attn.v_zero_point",
    "self_attn.q_zero_point",
    "self_attn.attn.q_scale",
    "self_attn.attn.prob_scale",
    "self_attn.kv_scale",
    "self_attn.q_global_scale",
    "self_attn.k_global_scale",
    "self_attn.v_global_scale",
    "mlp.up_proj.activation_scale",
    "mlp.up_proj.input_zero_point",
    "mlp.up_proj.input_global_scale",
    "mlp.up_proj.output_global_scale",
    "mlp.experts.gate_up_proj_activation_scale",
    "mlp.experts.down_proj_activation_scale",
)


def test_factors_of_activations_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    extra = {f"model.layers.0.{name}": torch.ones(1) for name in PUBLISHED}
    twin = write_checkpoint(folder, replace(KINDS["int8"], extra=extra))
    with open_tensors(weight_files(folder), declared_of(folder)) as source:
        assert source.shapes.keys() == load_file(twin / "model.safetensors").keys()
    unused = [end for end in LEFT_OUT if not any(name.endswith(end) for name in PUBLISHED)]
    assert not unused


@pytest.mark.parametrize("name", ["weight_scale_2", "pre_quant_scale", "k_scale.weight", "smooth"])
def test_what_weights_depend_on_is_not(tmp_path: Path, name: str) -> None:
    extra = {f"{UP}.{name}": torch.ones(1)}
    write_checkpoint(tmp_path / "model", replace(KINDS["fp8 modelopt"], extra=extra))
    problem = refusal(tmp_path / "model", tmp_path / "packs")
    assert problem.code == "bad_weights"
    assert f"{UP}.{name}" in str(problem)


@pytest.mark.parametrize(
    ("kind", "file", "said"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
    ],
)
def test_older_tools_say_it_in_files_of_their_own(
    tmp_path: Path, kind: str, file: str, said: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, KINDS[kind])
    made, _ = convert(folder, tmp_path / "packs")
    edit_json(folder / "config.json", lambda c: c.pop("quantization_config"))
    (folder / file).write_text(json.dumps(said))
    other, index = convert(folder, tmp_path / "packs")
    assert (made / BLOB_NAME).read_bytes() == (other / BLOB_NAME).read_bytes()
    assert file not in index.files
    assert file in SMALL_NAMES
    (folder / file).write_text(json.dumps(said | {"x": 1}))
    assert convert(folder, tmp_path / "packs")[0] != other


def test_what_is_said_of_plain_weights_is_to_be_removed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", replace(KINDS["nf4"], quantizes=lambda name: False))
    problem = refusal(tmp_path / "model", tmp_path / "packs")
    assert problem.code == "quantized_weights"
    assert "remove quantization_config from config.json" in str(problem)


UP = "model.layers.0.mlp.up_proj"


def _weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def _says(said: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(
        folder / "config.json", lambda c: c.update(quantization_config=said)
    )


def _last_scale(weights: dict[str, torch.Tensor]) -> None:
    weights[f"{UP}.weight_scale_inv"][-1] = torch.nan


def _last_code(weights: dict[str, torch.Tensor]) -> None:
    weights[f"{UP}.weight"].view(torch.uint8)[-1] = 0x7F


HOSTILE: list[tuple[str, str, str, Callable[[Path], None]]] = [
    ("a code is NaN", "fp8 blocks", "bad_weights", _weights(_last_code)),
    ("a scale is NaN", "fp8 blocks", "bad_weights", _weights(_last_scale)),
    (
        "no scale for one",
        "fp8 blocks",
        "bad_weights",
        _weights(lambda w: w.pop(f"{UP}.weight_scale_inv")),
    ),
    ("nothing is said", "fp8 blocks", "quantized_weights", _says(None)),
    ("nothing is said of bytes", "nf4", "bad_weights", _says(None)),
    ("said to be another", "fp8 blocks", "quantized_weights", _says(KINDS["gptq"].config)),
    (
        "there twice",
        "gptq",
        "bad_weights",
        _weights(lambda w: w.update({f"{UP}.weight": torch.ones(96, 64)})),
    ),
    (
        "bits without a scale",
        "int8",
        "bad_weights",
        _weights(lambda w: w.pop(f"{UP}.weight_scale")),
    ),
    ("a bias that counts", "gptq", "bad_weights", _weights(lambda w: w[f"{UP}.bias"].fill_(1))),
    (
        "another width",
        "int8",
        "bad_weights",
        _weights(lambda w: w.update({f"{UP}.weight": torch.ones(96, 32, dtype=torch.int8)})),
    ),
]


@pytest.mark.parametrize(
    ("kind", "code", "damage"), [one[1:] for one in HOSTILE], ids=[one[0] for one in HOSTILE]
)
def test_a_hostile_checkpoint_leaves_nothing_behind(
    tmp_path: Path, kind: str, code: str, damage: Callable[[Path], None]
) -> None:
    write_checkpoint(tmp_path / "model", KINDS[kind])
    damage(tmp_path / "model")
    problem = refusal(tmp_path / "model", tmp_path / "packs")
    assert problem.code == code
    assert len(str(problem)) > 30


@pytest.mark.parametrize("shape", [[0, 1 << 63], [0, 1 << 40, 1 << 40]])
def test_sizes_without_end_are_refused(tmp_path: Path, shape: list[int]) -> None:
    write_checkpoint(tmp_path / "model", KINDS["int8"])
    said = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    header = json.dumps(said).encode()
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    problem = refusal(tmp_path / "model", tmp_path / "packs")
    assert problem.code == "bad_weights"


def test_tensors_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model", KINDS["int8"])
    monkeypatch.setattr(files_module, "MAX_TENSORS", 20)
    problem = refusal(tmp_path / "model", tmp_path / "packs")
    assert (problem.code, "more than 20 tensors" in str(problem)) == ("bad_weights", True)


def test_tensors_that_cannot_be_read_are_not_all_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_module, "MAX_REFUSED", 3)
    bad = {f"tower.{number}.weight": torch.ones(2, dtype=FP8) for number in range(5)}
    write_checkpoint(tmp_path / "model", replace(KINDS["fp8 blocks"], extra=bad))
    problem = refusal(tmp_path / "model", tmp_path / "packs")
    assert (problem.code, "tower.3.weight" in str(problem)) == ("bad_weights", True)
