"""The C++ kernels of a processor: the library, how it is called, and what it wants.

`kernels/native/` holds the sources; the installation compiles them five times, for AVX-512 with
BF16, with VNNI and without, and for AVX2 with VNNI and without (setup.py), where there is a
compiler. `library()` loads the best that this processor runs; None: there is none, and whoever asks
uses torch's operators. Structures mirror native/forward.cpp's.

bfloat16, int8 weights with a bfloat16 scale a row, int4 in blocks (int4_blocks.py). The library has
one pool of threads and one caller at a time; calls let go of the interpreter's lock. What is passed
by address has to live until the call returns.
"""

import ctypes
import functools
import importlib.machinery
import logging
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.int4_blocks import FORMS, INT4_BLOCKS, ROWS
from kernels.sampling import Draw

logger = logging.getLogger(__name__)

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
# The largest head that attention has room for.
MAX_DIM = 256
# Rounds of looking for work before a thread of the pool sleeps: some 100 us.
SPIN_ROUNDS = 2000

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
# The file's name and what the processor must say it has.
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_BUILDS = {
    "_native_avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "_native_avx512_vnni": _AVX512 | {"avx512_vnni"},
    "_native_avx512": _AVX512,
    "_native_avx2_vnni": _AVX2 | {"avx_vnni"},
    "_native_avx2": _AVX2,
}
FORMATS = {torch.bfloat16: 0, torch.int8: 1}
"""Of weights that are no blocks, by their dtype."""
# Of blocks, by how their codes are read: int4.h has the steps that sums in 16 bits hold.
_INT4, _INT4_ZEROS, _INT4_TABLE, _INT4_HALVES, _INT4_WIDE = range(2, 7)
_MOST_OF_TABLE, _MOST_OF_WIDE = 32, 128


class Linear(Structure):
    """y = x W^T + bias: weight [n, k], or [2 n, k] of gate and up; bias [n] or null; scale, one a
    row of an int8 weight, else null; table, surplus, format: see `format_of`."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("table", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("surplus", c_int32),
    )


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is read: the numbers of `Linear`. `table` keeps what it points to alive."""

    number: int
    surplus: int = 0
    table: "ctypes.Array[ctypes.c_uint8] | None" = None

    def linear(self, weight: int, bias: int | None, scale: int | None, n: int, k: int) -> Linear:
        """A product with a weight of this format, by addresses."""
        table = None if self.table is None else ctypes.addressof(self.table)
        return Linear(weight, bias, scale, table, n, k, self.number, self.surplus)


@functools.cache
def format_of(dtype: torch.dtype, scheme: str = INT4_BLOCKS) -> Format | None:
    """Of weights of that type; uint8: of blocks by the name of their form (int4_blocks.FORMS).
    None: there is no kernel."""
    if dtype != torch.uint8:
        number = FORMATS.get(dtype)
        return None if number is None else Format(number)
    form = FORMS[scheme]
    surplus = -min(form.values)
    stored = [value + surplus for value in form.values]
    if stored == list(range(16)):
        return None if form.halves else Format(_INT4_ZEROS if form.zeros else _INT4, surplus)
    if form.zeros or max(stored) > (_MOST_OF_TABLE if form.halves else _MOST_OF_WIDE):
        return None
    table = (ctypes.c_uint8 * len(stored))(*stored)
    if form.halves:
        return Format(_INT4_HALVES, surplus, table)
    return Format(_INT4_TABLE if max(stored) <= _MOST_OF_TABLE else _INT4_WIDE, surplus, table)


class Norm(Structure):
    """See kernels/rms_norm.py; weight null: none."""

    _fields_ = (
        ("weight", c_void_p),
        ("eps", c_float),
        ("unit_offset", c_int32),
        ("center", c_int32),
    )


class NativeRows(Structure):
    """kernels/paged_attention.py Rows, by address."""

    _fields_ = (
        ("token_index", c_void_p),
        ("chunk", c_void_p),
        ("slot", c_void_p),
        ("context_len", c_void_p),
        ("first", c_void_p),
        ("num_rows", c_int32),
        ("q_len", c_int32),
        ("max_blocks", c_int32),
        ("reserved", c_int32),
    )


class Cache(Structure):
    """One layer's cache: the arena, its row of the chunk table, the geometry in units."""

    _fields_ = (
        ("arena", c_void_p),
        ("table", c_void_p),
        ("unit_bytes", c_int64),
        ("block_units", c_int64),
        ("v_start_units", c_int64),
        ("block_tokens", c_int32),
        ("num_kv_heads", c_int32),
        ("dim", c_int32),
        ("window", c_int32),
    )


class AttentionForm(Structure):
    """Heads, the scale of scores, the soft cap (0: none)."""

    _fields_ = (("num_heads", c_int32), ("scale", c_float), ("softcap", c_float))


class Gate(Structure):
    """act(gate) * (up + shift), cut at `limit`; `layout` 0: gate's values, then up's; 1: in turn.
    `alpha`: silu's."""

    _fields_ = (
        ("layout", c_int32),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("shift", c_float),
    )


class Experts(Structure):
    """`up` (gate's rows among it), `down`: of the first expert; the others so many bytes on."""

    _fields_ = (
        ("up", Linear),
        ("down", Linear),
        ("up_bytes", c_int64),
        ("down_bytes", c_int64),
        ("gate", Gate),
        ("num_experts", c_int32),
    )


class Router(Structure):
    """`gate` [num_experts, k]; weights are a softmax over all, or (`normalize`) over the chosen."""

    _fields_ = (("gate", Linear), ("top_k", c_int32), ("normalize", c_int32))


class Mixture(Structure):
    """A layer's router and experts."""

    _fields_ = (("router", Router), ("experts", Experts))


class Layer(Structure):
    """Weights, form and cache of one layer; `group`: which of the step's groups. With a `mixture`,
    or with neither that nor `down`, there is no gate_up."""

    _fields_ = (
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("mixture", POINTER(Mixture)),
        ("input_norm", Norm),
        ("post_norm", Norm),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("cache", Cache),
        ("form", AttentionForm),
        ("activation", c_int32),
        ("rotates", c_int32),
        ("interleaved", c_int32),
        ("head_norms", c_int32),
        ("residual_multiplier", c_float),
        ("group", c_int32),
    )


class Group(Structure):
    """One layer group's rows in a step, and where its tokens are written."""

    _fields_ = (
        ("calls", POINTER(NativeRows)),
        ("token_chunk", c_void_p),
        ("token_slot", c_void_p),
        ("token_offset", c_void_p),
        ("num_calls", c_int32),
        ("reserved", c_int32),
    )


class Step(Structure):
    """One step: x and residual [T, size] in and out; the others [T, ...] are work space."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("groups", POINTER(Group)),
        ("x", c_void_p),
        ("residual", c_void_p),
        ("y", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("hidden", c_void_p),
        ("half", c_int32),
        ("size", c_int32),
        ("first", c_int32),
        ("reserved", c_int32),
    )


class _Draw(Structure):
    """kernels/sampling.py Draw, by address."""

    _fields_ = (
        ("temperature", c_void_p),
        ("number", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
    )


class NativeLibrary:
    """The functions of one build."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be loaded."""
        self.name = path.name.partition(".")[0].removeprefix("_native_")
        self._library = ctypes.CDLL(str(path))
        calls = self._library
        calls.polyhost_threads.argtypes = (c_int, c_int)
        calls.polyhost_layers.argtypes = (POINTER(Layer), c_int, POINTER(Step))
        calls.polyhost_linear.argtypes = (POINTER(Linear), c_int, *_of("pnpii"))
        calls.polyhost_experts.argtypes = (POINTER(Experts), *_of("pnppip"))
        calls.polyhost_mixture.argtypes = (POINTER(Mixture), *_of("pnp"))
        calls.polyhost_attention.argtypes = (
            POINTER(Cache),
            POINTER(AttentionForm),
            POINTER(NativeRows),
            *_of("ipnp"),
        )
        calls.polyhost_add_norm.argtypes = (POINTER(Norm), *_of("pppnifi"))
        calls.polyhost_draw.argtypes = (*_of("pnii"), POINTER(_Draw), *_of("pp"))
        self.dim_multiple = int(calls.polyhost_dim_multiple())
        # Whether products with int8 weights round x too; with int4 they always do.
        self.rounds_int8 = bool(calls.polyhost_rounds_int8())

    def function(self, name: str, *kinds: type) -> Callable[..., None]:
        """A function of native/forward.cpp whose structures another module has."""
        function = self._library[f"polyhost_{name}"]
        function.argtypes = kinds
        return function

    def set_threads(self, num_threads: int, spin_rounds: int = SPIN_ROUNDS) -> None:
        """How many threads share the work, the caller among them. To be called before all else,
        in the process that computes."""
        self._library.polyhost_threads(num_threads, spin_rounds)

    def layers(self, layers: "ctypes.Array[Layer]", step: Step, begin: int, end: int) -> None:
        """Layers [begin, end) over one step's tokens. The last one may be without an MLP."""
        first = ctypes.cast(ctypes.byref(layers, begin * ctypes.sizeof(Layer)), POINTER(Layer))
        self._library.polyhost_layers(first, end - begin, ctypes.byref(step))

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str = "none",
        wide: bool = False,
        scale: torch.Tensor | None = None,
        rounding: bool = True,
        scheme: str = INT4_BLOCKS,
    ) -> torch.Tensor:
        """x [T, K], weight [N, K] to [T, N]; with an activation weight [2 N, K] and
        act(gate) * up. `wide`: float32 comes out. `scale`: of the rows of an int8 weight; a uint8
        weight is int4 in blocks, of the form that `scheme` names. `rounding` off: int8 weights meet
        x as it is, on every build."""
        form = format_of(weight.dtype, scheme)
        assert form is not None
        rows = weight.shape[0] if weight.dim() == 2 else weight.shape[0] * ROWS
        rows = rows if activation == "none" else rows // 2
        out = x.new_empty(len(x), rows, dtype=torch.float32 if wide else x.dtype)
        op = form.linear(weight.data_ptr(), _address(bias), _address(scale), rows, x.shape[1])
        self._library.polyhost_linear(
            ctypes.byref(op),
            ACTIVATIONS[activation],
            x.data_ptr(),
            len(x),
            out.data_ptr(),
            wide,
            not rounding,
        )
        return out

    def experts(
        self, experts: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x [T, H] through the experts chosen for each token, int64 [T, K], times float32 weights
        [T, K]. Numbers of no expert add nothing."""
        out = torch.empty_like(x)
        chosen, weights = chosen.contiguous(), weights.contiguous()
        self._library.polyhost_experts(
            ctypes.byref(experts),
            x.data_ptr(),
            len(x),
            chosen.data_ptr(),
            weights.data_ptr(),
            chosen.shape[1],
            out.data_ptr(),
        )
        return out

    def mixture(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] through the experts that its router chooses."""
        out = torch.empty_like(x)
        self._library.polyhost_mixture(ctypes.byref(mixture), x.data_ptr(), len(x), out.data_ptr())
        return out

    def attention(
        self,
        cache: Cache,
        form: AttentionForm,
        calls: "ctypes.Array[NativeRows]",
        query: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """query [T, stride], its first heads those of attention; out [T, heads * dim]."""
        self._library.polyhost_attention(
            ctypes.byref(cache),
            ctypes.byref(form),
            calls,
            len(calls),
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
        )

    def add_norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor, multiplier: float, first: bool
    ) -> torch.Tensor:
        """residual += multiplier x in place (`first`: residual = x); the norm of it."""
        out = torch.empty_like(x)
        self._library.polyhost_add_norm(
            ctypes.byref(norm),
            x.data_ptr(),
            residual.data_ptr(),
            out.data_ptr(),
            len(x),
            x.shape[-1],
            multiplier,
            first,
        )
        return out

    def draw(self, logits: torch.Tensor, how: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Token int64 [R] and broken bool [R], as kernels/sampling.py defines them. `how.cut` is
        not needed."""
        tokens = torch.empty(len(logits), dtype=torch.int64)
        broken = torch.empty(len(logits), dtype=torch.bool)
        fields = (how.temperature, how.number, how.min_p, how.top_k, how.top_p)
        self._library.polyhost_draw(
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            ctypes.byref(_Draw(*(field.data_ptr() for field in fields))),
            tokens.data_ptr(),
            broken.data_ptr(),
        )
        return tokens, broken


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _of(letters: str) -> tuple[type, ...]:
    kinds: dict[str, type] = {"p": c_void_p, "n": c_int64, "i": c_int, "f": c_float}
    return tuple(kinds[letter] for letter in letters)


@dataclass(frozen=True, slots=True)
class Processor:
    """What the processor says of itself; empty where nothing says so."""

    vendor: str = ""
    flags: frozenset[str] = frozenset()


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The first of this machine's."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return Processor()
    first = text.partition("\n\n")[0]
    said = dict(line.partition(":")[::2] for line in first.splitlines())
    words = {key.strip(): value.strip() for key, value in said.items()}
    return Processor(words.get("vendor_id", ""), frozenset(words.get("flags", "").split()))


def builds_for(found: Processor) -> list[str]:
    """Builds that the processor runs, the fastest first.

    Where Intel has the instruction for products of pairs it has half the throughput of the two
    products of widened numbers that it replaces: 111 against 224 GFLOP/s and core, measured.
    """
    order = list(_BUILDS)
    if found.vendor == "GenuineIntel":
        order.insert(2, order.pop(0))
    return [name for name in order if _BUILDS[name] <= found.flags]


def find(name: str, folder: Path = Path(__file__).parent) -> Path | None:
    """The compiled file of that name, if the installation made one."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.exists():
            return path
    return None


@functools.cache
def library() -> NativeLibrary | None:
    """The best build that is there and that this processor runs."""
    for name in builds_for(processor()):
        path = find(name)
        if path is None:
            continue
        try:
            return NativeLibrary(path)
        except OSError as error:
            logger.warning("%s cannot be loaded: %s", path.name, error)
    return None
