"""What a checkpoint's small files say of how its weights are quantized.

`quantization_config` in config.json (older releases: `compression_config`), ModelOpt's
hf_quant_config.json, or the files of older GPTQ and AWQ tools. Says which format the tensors are
read by, and what their shapes leave open: bits, blocks that share a scale, the versions of a
format. Which modules are quantized is not asked here: a weight with scales is, one without them is
plain, and the lists of exceptions follow from that. What is not known is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RegistrationRefused
from kernels.int4_blocks import E2M1, E2M1_HALVES, FP4, INT4_BLOCKS, NF4, ZEROS

BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that say it beside config.json, and what they mean where they do not say."""
MAX_GROUP = 1 << 20
MIN_GROUP = 16
"""Scales are held whole in float32: with fewer weights to each they would outgrow these."""
MAX_PARTS = 1 << 8
"""Groups of modules that are quantized in different ways."""
SUPPORTED = (
    "FP8 (fp8, fbgemm_fp8), compressed-tensors (integers, FP8, NVFP4, MXFP4), ModelOpt (FP8, "
    "NVFP4), MXFP4, GPTQ, AWQ, bitsandbytes, and GGUF"
)
CODE = "quantized_weights"
GGUF = "gguf"

_COMPRESSED_FORMATS = frozenset(
    {
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mixed-precision",
    }
)
_FP4_FORMATS = {"nvfp4-pack-quantized": E2M1_HALVES, "mxfp4-pack-quantized": E2M1}
_MIXED = "MIXED_PRECISION"
_MODELOPT_ALGORITHMS = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", _MIXED})
_FIELD_BITS = (2, 4, 8)
_BY_INDEX = frozenset({"group", "dynamic", "true"})
"""What compressed-tensors calls act-order; by "weight" or "static" columns stay in place."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What is said beside the tensors.

    blocks       rows and columns that may share a scale, beside whole matrices and single rows
    bits         of a packed code; one of them
    zero_offset  what stored zeros are short of
    symmetric    whether codes are said to be around zero
    act_order    whether columns are said to be in groups by an index, and not by their place
    codes        the form in an int4 pack, where it is known otherwise (kernels/int4_blocks.py)
    """

    method: str
    blocks: tuple[tuple[int, int], ...] = ()
    bits: tuple[int, ...] = ()
    zero_offset: int = 0
    symmetric: bool = False
    act_order: bool = False
    codes: str = ""

    @property
    def scheme(self) -> str:
        """The form of int4 that keeps the codes as far as that is said here, "" for none."""
        if self.codes:
            return self.codes
        whole = all(rows == 1 and columns % 32 == 0 for rows, columns in self.blocks)
        if self.bits != (4,) or self.act_order or not whole:
            return ""
        return INT4_BLOCKS if self.symmetric else ZEROS


def declared_in(config: Mapping[str, Any], beside: Mapping[str, Any]) -> Declared | None:
    """None: the weights are plain. `config`: config.json; `beside`: a file of BESIDE, or nothing.

    Raises RegistrationRefused("quantized_weights").
    """
    said = config.get("quantization_config") or config.get("compression_config")
    if not said and isinstance(config.get("text_config"), Mapping):
        said = config["text_config"].get("quantization_config")
    if not said and beside:
        inner = beside.get("quantization")
        said = {**inner, "quant_method": "modelopt"} if isinstance(inner, Mapping) else beside
    if not said:
        return None
    if not isinstance(said, Mapping):
        raise _refused("quantization_config in config.json is not an object")
    method = said.get("quant_method")
    if method is None and "config_groups" in said:
        method = "compressed-tensors"
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise _refused(f"the quantization method {method!r:.60} is not supported")
    return reader(said)


def _fp8(said: Mapping[str, Any]) -> Declared:
    size = said.get("weight_block_size")
    if size is None:
        return Declared("fp8")
    if not isinstance(size, list) or len(size) != 2:
        raise _refused(f"weight_block_size is {size!r:.60}, not two numbers")
    return Declared("fp8", (_block(size),))


def _compressed(said: Mapping[str, Any]) -> Declared:
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("quantization_config has no config_groups")
    parts = list(groups.values())
    if len(parts) > MAX_PARTS or not all(isinstance(part, Mapping) for part in parts):
        raise _refused("config_groups is not as compressed-tensors writes it")
    formats = [said.get("format"), *(part.get("format") for part in parts)]
    for name in formats:
        if name is not None and str(name) not in _COMPRESSED_FORMATS:
            raise _refused(f"the format {name!r:.60} of compressed-tensors is not supported")
    sparsity = said.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refused("sparse weights of compressed-tensors are not supported")
    if said.get("transform_config"):
        raise _refused("weights that are rotated (transform_config) are not supported")
    weights = [part.get("weights") for part in parts]
    described = [one for one in weights if isinstance(one, Mapping)]
    integers = [one for one in described if one.get("type") != "float"]
    bits = _known_bits(one["num_bits"] for one in integers if one.get("num_bits") is not None)
    blocks = {(1, size) for one in described if (size := _group(one.get("group_size")))}
    for one in described:
        structure = one.get("block_structure")
        if isinstance(structure, list) and len(structure) == 2:
            blocks.add(_block(structure))
    even = all(one.get("symmetric", True) for one in described)
    orders = {str(one.get("actorder")).lower() in _BY_INDEX for one in described}
    return Declared(
        "compressed-tensors",
        tuple(sorted(blocks)),
        bits,
        symmetric=even and True not in orders,
        act_order=orders == {True},
        codes=_FP4_FORMATS.get(str(said.get("format")), ""),
    )


def _gptq(said: Mapping[str, Any]) -> Declared:
    kind = said.get("checkpoint_format") or said.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2") or said.get("is_marlin_format"):
        raise _refused(f"the layout {kind!r:.60} of GPTQ is not supported (gptq and gptq_v2 are)")
    special = said.get("dynamic") or {}
    if not isinstance(special, Mapping) or any(not str(key).startswith("-") for key in special):
        raise _refused("GPTQ with other bits for single modules (dynamic) is not supported")
    size = _group(said.get("group_size"))
    blocks = ((1, size),) if size else ()
    bits = _known_bits([said.get("bits")])
    return Declared(
        "gptq",
        blocks,
        bits,
        zero_offset=1 if kind == "gptq" else 0,
        symmetric=said.get("sym") is True,
        act_order=bool(said.get("desc_act")),
    )


def _awq(said: Mapping[str, Any]) -> Declared:
    version = said.get("version") or said.get("format") or "gemm"
    bits = _first(said, "bits", "w_bit")
    if str(version).lower() != "gemm" or bits not in (None, 4):
        raise _refused(
            f"AWQ of version {version!r:.60} with {bits!r:.20} bits is not supported (version "
            "gemm with 4 bits is)"
        )
    if str(said.get("backend")).lower() == "llm-awq":
        raise _refused("the layout of llm-awq is not supported (that of AutoAWQ is)")
    if said.get("zero_point", True) is not True:
        raise _refused("AWQ without zero points is not supported")
    size = _group(_first(said, "group_size", "q_group_size"))
    return Declared("awq", ((1, size),) if size else (), (4,))


def _modelopt(said: Mapping[str, Any]) -> Declared:
    found, known = [said.get("quant_algo")], _MODELOPT_ALGORITHMS
    if found == [_MIXED]:
        layers = said.get("quantized_layers") or {}
        parts = list(layers.values()) if isinstance(layers, Mapping) else [layers]
        if not all(isinstance(part, Mapping) for part in parts):
            raise _refused("quantized_layers is not as ModelOpt writes it")
        found, known = [part.get("quant_algo") for part in parts], known - {_MIXED}
    for algorithm in found:
        if str(algorithm) not in known:
            names = ", ".join(sorted(known))
            raise _refused(f"ModelOpt's {algorithm!r:.60} is not supported ({names} are)")
    return Declared("modelopt", codes=E2M1_HALVES if found == ["NVFP4"] else "")


def _bitsandbytes(said: Mapping[str, Any]) -> Declared:
    if not said.get("load_in_4bit"):
        return Declared("bitsandbytes")
    return Declared("bitsandbytes", codes=FP4 if said.get("bnb_4bit_quant_type") == "fp4" else NF4)


def _plainly(method: str) -> Callable[[Mapping[str, Any]], Declared]:
    return lambda said: Declared(method)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Declared]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _plainly("fp8"),
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "mxfp4": _plainly("mxfp4"),
    "bitsandbytes": _bitsandbytes,
}


def _first(said: Mapping[str, Any], *names: str) -> Any:
    """The value under the first of these names that has one."""
    return next((said[name] for name in names if said.get(name) is not None), None)


def _known_bits(found: Iterable[Any]) -> tuple[int, ...]:
    bits = set()
    for one in found:
        if one not in _FIELD_BITS:
            raise _refused(f"weights of {one!r:.60} bits are not supported (2, 4, 8 are)")
        bits.add(int(one))
    return tuple(sorted(bits))


def _group(value: Any) -> int:
    """Columns that share a scale; 0 for all of a row."""
    return 0 if value is None or value == -1 else _block([1, value])[1]


def _block(sizes: list[Any]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    rows, columns = sizes
    known = all(type(size) is int and 0 < size <= MAX_GROUP for size in sizes)
    if not known or rows * columns < MIN_GROUP:
        raise _refused(
            f"a scale for {rows!r:.30} x {columns!r:.30} weights is not supported ({MIN_GROUP} "
            f"weights or more are, and of rows and columns {MAX_GROUP} at most)"
        )
    return rows, columns


def _refused(why: str) -> RegistrationRefused:
    return RegistrationRefused(
        CODE,
        f"the checkpoint cannot be read: {why}. Supported quantized checkpoints are: {SUPPORTED}; "
        "register one of these, or the unquantized checkpoint",
    )
