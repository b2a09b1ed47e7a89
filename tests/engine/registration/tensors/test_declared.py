"""What is said of a quantization beside the tensors: read where it is known, refused where not."""

from typing import Any

import pytest

from engine.errors import RegistrationRefused
from engine.registration.tensors import Declared, declared_in
from kernels.int4_blocks import E2M1, E2M1_HALVES, FP4, INT4_BLOCKS, NF4, ZEROS
from tests.engine.registration.quantized_kit import KINDS, compressed


def read(said: Any) -> Declared | None:
    return declared_in({"quantization_config": said}, {})


def test_plain_checkpoints_say_nothing() -> None:
    assert declared_in({}, {}) is None
    assert read({}) is read(None) is None


def test_every_place_is_looked_at() -> None:
    fp8 = {"quant_method": "fp8"}
    assert declared_in({"text_config": {"quantization_config": fp8}}, {}) == Declared("fp8")
    old = {"config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 128}}}}
    found = declared_in({"compression_config": old}, {})
    assert found == Declared("compressed-tensors", ((1, 128),), (4,), symmetric=True)
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    assert declared_in({}, file) == Declared("modelopt", codes=E2M1_HALVES)


def test_versions_differ_in_their_zeros() -> None:
    said = KINDS["gptq"].config
    assert read(said) == Declared("gptq", ((1, 32),), (4,), zero_offset=1)
    second = Declared("gptq", ((1, 32),), (4,))
    assert read(said | {"checkpoint_format": "gptq_v2"}) == second
    assert read(said | {"group_size": -1, "dynamic": {"-:lm_head": {}}}) == Declared(
        "gptq", (), (4,), zero_offset=1
    )


def test_both_names_of_a_field_are_known() -> None:
    second = Declared("gptq", ((1, 128),), (4,), symmetric=True, act_order=True)
    assert read(GPTQ | {"format": "gptq_v2", "sym": True, "desc_act": True}) == second
    assert read(GPTQ | {"format": "gptq"}) == read(GPTQ)
    awq = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "format": "gemm"}
    assert read(awq) == Declared("awq", ((1, 64),), (4,))
    assert read(AWQ | {"group_size": -1, "backend": "autoawq"}) == Declared("awq", (), (4,))


@pytest.mark.parametrize(
    ("orders", "wanted"),
    [
        ([None], (True, False)),
        (["weight"], (True, False)),
        (["static"], (True, False)),
        (["group"], (False, True)),
        (["dynamic"], (False, True)),
        ([True], (False, True)),
        (["group", None], (False, False)),
    ],
)
def test_compressed_tensors_says_act_order(orders: list[Any], wanted: tuple[bool, bool]) -> None:
    said = compressed("pack-quantized")
    weights = [{"num_bits": 4, "type": "int", "group_size": 32, "actorder": o} for o in orders]
    said["config_groups"] = {str(i): {"weights": one} for i, one in enumerate(weights)}
    found = read(said)
    assert found is not None
    assert (found.symmetric, found.act_order) == wanted


def test_modelopts_layers_may_differ() -> None:
    said = KINDS["mixed modelopt"].config
    assert read(said) == Declared("modelopt")
    layers = said["quantized_layers"] | {"mlp.gate_proj": {"quant_algo": "NVFP4_X"}}
    with pytest.raises(RegistrationRefused, match=r"'NVFP4_X'.* \(FP8, .*, NVFP4 are\)") as caught:
        read(said | {"quantized_layers": layers})
    assert caught.value.code == "quantized_weights"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
REFUSED: dict[str, Any] = {
    "a list": [1],
    "no method": {"bits": 4},
    "unknown": {"quant_method": "hqq"},
    "method no name": {"quant_method": {"x": 1}},
    "fp8, one number": {"quant_method": "fp8", "weight_block_size": 128},
    "fp8, block of 0": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    "fp8, block of 12": {"quant_method": "fp8", "weight_block_size": [4, 3]},
    "gptq, group of 8": GPTQ | {"group_size": 8},
    "awq, group of 8": AWQ | {"group_size": 8},
    "integers, group of 8": compressed("pack-quantized", num_bits=4, type="int", group_size=8),
    "fp8, block endless": {"quant_method": "fp8", "weight_block_size": [1 << 40, 128]},
    "gptq, 3 bits": GPTQ | {"bits": 3},
    "gptq, no bits": GPTQ | {"bits": None},
    "gptq, bits a list": GPTQ | {"bits": [4]},
    "modelopt, a list": {"quant_method": "modelopt", "quant_algo": ["FP8"]},
    "layout an object": compressed("pack-quantized") | {"format": {"x": 1}},
    "gptq, group of 0": GPTQ | {"group_size": 0},
    "gptq, group of -2": GPTQ | {"group_size": -2},
    "gptq, group true": GPTQ | {"group_size": True},
    "gptq, for marlin": GPTQ | {"checkpoint_format": "marlin"},
    "gptq, format marlin": GPTQ | {"format": "marlin"},
    "awq, format gemv": {"quant_method": "awq", "bits": 4, "group_size": 128, "format": "gemv"},
    "awq, 8 bits by another name": {"quant_method": "awq", "w_bit": 8, "q_group_size": 128},
    "awq, group of 0": AWQ | {"group_size": 0},
    "awq, another library": AWQ | {"backend": "llm-awq"},
    "gptq, single modules": GPTQ | {"dynamic": {"+:.*mlp": {"bits": 8}}},
    "awq, gemv": AWQ | {"version": "gemv"},
    "awq, 8 bits": AWQ | {"bits": 8},
    "awq, no zeros": AWQ | {"zero_point": False},
    "modelopt, another": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    "modelopt, layers a list": MIXED | {"quantized_layers": [1]},
    "modelopt, a layer a word": MIXED | {"quantized_layers": {"x": "FP8"}},
    "modelopt, mixed within": MIXED | {"quantized_layers": {"x": MIXED}},
    "no groups": {"quant_method": "compressed-tensors"},
    "groups a list": {"quant_method": "compressed-tensors", "config_groups": {"0": []}},
    "sparse": compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-bitmask"}},
    "rotated": compressed("pack-quantized") | {"transform_config": {"x": 1}},
    "another layout": compressed("marlin-24"),
    "five bits": compressed("pack-quantized", num_bits=5, type="int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(RegistrationRefused) as caught:
        read(REFUSED[name])
    assert caught.value.code == "quantized_weights"
    assert "Supported quantized checkpoints are" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        (GPTQ, ZEROS),
        (GPTQ | {"sym": True}, INT4_BLOCKS),
        (GPTQ | {"desc_act": True}, ""),
        (GPTQ | {"bits": 8}, ""),
        (GPTQ | {"group_size": 16}, ""),
        (AWQ, ZEROS),
        ({"quant_method": "fp8"}, ""),
        (KINDS["nvfp4"].config, E2M1_HALVES),
        (KINDS["mxfp4"].config, E2M1),
        (KINDS["nvfp4 modelopt"].config, E2M1_HALVES),
        (KINDS["nf4"].config, NF4),
        (KINDS["nf4"].config | {"bnb_4bit_quant_type": "fp4"}, FP4),
        (KINDS["bitsandbytes int8"].config, ""),
        (KINDS["int4"].config, INT4_BLOCKS),
        (KINDS["int4 asymmetric, ordered"].config, ""),
    ],
)
def test_the_form_that_keeps_codes_is_known_beforehand(said: dict[str, Any], scheme: str) -> None:
    found = read(said)
    assert found is not None
    assert found.scheme == scheme
