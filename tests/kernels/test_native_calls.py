"""The C++ kernels against their definitions in torch: every build that this processor runs.

Where the installation compiled none, because there was no compiler, there is nothing to test.
"""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.registration.quantize import dequantize, quantize_rows
from kernels.native_calls import (
    AttentionForm,
    Cache,
    NativeLibrary,
    NativeRows,
    Norm,
    Processor,
    builds_for,
    find,
    processor,
)
from kernels.paged_attention import LayerGeometry
from kernels.paged_attention import Rows as PagedRows
from kernels.rms_norm import rms_norm_ref
from kernels.sampling import draw_ref
from tests.kernels.guarded import Guards
from tests.kernels.paged_case import SCALE, PagedCase, Row
from tests.kernels.test_sampling import KINDS, VOCAB, drawn_how, parameters

BUILDS = [name for name in builds_for(processor()) if find(name) is not None]
NOTHING = pytest.param(
    "", marks=pytest.mark.skip(reason="no C++ compiler when this was installed, or no x86-64")
)
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"})


@pytest.fixture(
    name="native",
    scope="module",
    params=[pytest.param(name) for name in BUILDS] or [NOTHING],
)
def _native(request: pytest.FixtureRequest) -> NativeLibrary:
    path = find(request.param)
    assert path is not None
    built = NativeLibrary(path)
    built.set_threads(3)
    return built


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> bool:
    """Relative to the largest, NaN counting as far."""
    error = (found.double() - wanted.double()).abs().max()
    return float(error.nan_to_num(nan=float("inf"))) <= bound * float(wanted.abs().max())


# Rows and widths that end in the middle of every register, strip, panel, piece and block.
SIZES = [
    *[(1, 64, 5), (1, 896, 300), (2, 70, 33), (3, 31, 16), (4, 128, 8), (5, 897, 257)],
    *[(8, 160, 40), (9, 65, 17), (16, 300, 31), (21, 129, 16), (40, 33, 50), (130, 96, 70)],
    *[(75, 4100, 19), (1100, 40, 9), (6, 600, 1500)],
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_the_product(
    native: NativeLibrary, sizes: tuple[int, int, int], biased: bool
) -> None:
    num_rows, k, n = sizes
    guards = Guards()
    x = guards.input(random(num_rows, k, seed=1))
    weight = guards.input(random(n, k, seed=2, scale=k**-0.5))
    bias = guards.input(random(n, seed=3)) if biased else None
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert close(native.linear(x, weight, bias, wide=True), wanted, 3e-6)
    rounded = native.linear(x, weight, bias)
    assert rounded.dtype == torch.bfloat16
    assert close(rounded, wanted, 2**-8)
    guards.check()


@pytest.mark.parametrize("num_rows", [2, 7, 16, 40])
def test_a_row_is_nobody_elses(native: NativeLibrary, num_rows: int) -> None:
    """Whatever stands beside it, to the bit: another tenant's text does, or numbers that broke."""
    weight = random(50, 300, seed=2)
    x = random(num_rows, 300, seed=1)
    alone = native.linear(x, weight, wide=True)
    for kept in {0, num_rows // 2, num_rows - 1}:
        others = random(num_rows, 300, seed=4)
        others[::2] = float("nan")
        others[kept] = x[kept]
        assert torch.equal(native.linear(others, weight, wide=True)[kept], alone[kept])


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize(("k", "n"), [(333, 70), (896, 33)])
def test_a_row_is_the_same_among_any_number(
    native: NativeLibrary, stored: str, k: int, n: int
) -> None:
    """To the bit: a seed repeats whatever a request is batched with."""
    x, weight = random(70, k, seed=1), random(2 * n, k, seed=2)
    scale = None
    if stored == "int8":
        weight, scale = (weight * 30).to(torch.int8), random(2 * n, seed=3)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return native.linear(rows, weight, None, "silu", True, scale, rounding=False)

    whole = product(x)
    for begin, count in [(0, 1), (69, 1), (3, 2), (8, 3), (1, 4), (5, 5), (2, 6), (40, 9), (7, 33)]:
        rows = slice(begin, begin + count)
        assert torch.equal(product(x[rows].contiguous()), whole[rows]), count


@pytest.mark.parametrize("sizes", [(4, 70, 37), (11, 37, 37), (40, 300, 37)])
def test_broken_products_are_not_remembered(
    native: NativeLibrary, sizes: tuple[int, int, int]
) -> None:
    """Work space that held another model's NaN, also behind the ends of rows and columns."""
    num_rows, k, n = sizes
    x, weight = random(num_rows, k, seed=1), random(2 * n, k, seed=2)
    wanted = native.linear(x, weight, activation="silu", wide=True)
    broken = torch.full((64, 896), torch.nan).bfloat16()
    native.set_threads(1)  # whose work space is the one that held it
    assert native.linear(broken, broken, activation="silu").isnan().all()
    assert torch.equal(native.linear(x, weight, activation="silu", wide=True), wanted)
    native.set_threads(3)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", SIZES)
def test_gate_and_up_come_out_multiplied(
    native: NativeLibrary, sizes: tuple[int, int, int], activation: str
) -> None:
    num_rows, k, n = sizes
    x, weight = random(num_rows, k, seed=1), random(2 * n, k, seed=2, scale=2 * k**-0.5)
    gate, up = functional.linear(x.double(), weight.double()).chunk(2, -1)
    if activation == "silu":
        acted = functional.silu(gate)
    else:
        acted = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    found = native.linear(x, weight, activation=activation, wide=True)
    assert close(found, acted * up, 5e-6)


@pytest.mark.parametrize("sizes", SIZES)
def test_int8_weights_are_what_they_stand_for(
    native: NativeLibrary, sizes: tuple[int, int, int]
) -> None:
    """With x as it is; where it is rounded too: test_byte_products.py."""
    num_rows, k, n = sizes
    x, bias = random(num_rows, k, seed=1), random(n, seed=5)
    weight, scale = quantize_rows(random(2 * n, k, seed=2, scale=k**-0.5), torch.bfloat16)
    exact = dequantize(weight, scale).double()
    how: Any = {"wide": True, "rounding": False}
    single = native.linear(x, weight[:n].contiguous(), bias, scale=scale[:n], **how)
    assert close(single, functional.linear(x.double(), exact[:n], bias.double()), 3e-6)
    gate, up = functional.linear(x.double(), exact).chunk(2, -1)
    both = native.linear(x, weight, activation="silu", scale=scale, **how)
    assert close(both, functional.silu(gate) * up, 5e-6)


@pytest.mark.parametrize("form", ["llama", "gemma", "olmo", "bare"])
@pytest.mark.parametrize("size", [16, 33, 896])
def test_norms_and_the_stream(native: NativeLibrary, form: str, size: int) -> None:
    x, stream, weight = random(5, size), random(5, size, seed=1), random(size, seed=2)
    given = None if form in ("olmo", "bare") else weight
    offset, center = form == "gemma", form == "olmo"
    wanted, kept = rms_norm_ref(x, given, 1e-5, stream.clone(), 0.7, offset, center)
    address = None if given is None else given.data_ptr()
    norm = Norm(address, 1e-5, offset, center)
    residual = stream.clone()
    found = native.add_norm(norm, x, residual, 0.7, first=False)
    # 0.7 x is rounded by one and not by the other, so the last bit may differ.
    assert close(residual, kept, 2**-8)
    assert close(found, wanted, 2**-7)
    fresh = torch.full_like(stream, torch.nan)
    found = native.add_norm(norm, x, fresh, 0.7, first=True)
    assert torch.equal(fresh, x)
    plain, _ = rms_norm_ref(x, given, 1e-5, None, 1.0, offset, center)
    assert close(found, plain, 2**-8)


def attend(native: NativeLibrary, case: PagedCase) -> torch.Tensor:
    """What comes out, over the rows as a step has them."""
    geometry = case.geometry
    cache = Cache(
        arena=case.arena.data_ptr(),
        table=case.chunk_table.data_ptr(),
        unit_bytes=geometry.unit_bytes,
        block_units=geometry.block_units,
        v_start_units=geometry.v_start_units,
        block_tokens=geometry.block_tokens,
        num_kv_heads=geometry.layer.num_kv_heads,
        dim=geometry.layer.k_dim,
        window=geometry.layer.window,
    )
    rows = case.batch.rows
    calls = (NativeRows * len(rows))(
        *(
            NativeRows(
                call.token_index.data_ptr(),
                call.chunk.data_ptr(),
                call.slot.data_ptr(),
                call.context_len.data_ptr(),
                call.first.data_ptr(),
                call.chunk.shape[0],
                call.token_index.shape[1],
                call.chunk.shape[1],
            )
            for call in rows
        )
    )
    native.attention(
        cache,
        AttentionForm(case.heads, SCALE, case.softcap),
        calls,
        case.query.contiguous(),
        case.out,
    )
    return case.out


MIXES: list[list[Row]] = [
    [(1, 1), (5, 1), (64, 1), (65, 1), (200, 1)],
    [(37, 37), (9, 3), (130, 1), (140, 70), (1, 1)],
]


@pytest.mark.parametrize("rows", MIXES)
@pytest.mark.parametrize("window", [0, 13, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (6, 2), (70, 2), (4, 4)])
def test_attention_reads_what_a_row_sees(
    native: NativeLibrary, rows: list[Row], window: int, heads: int, kv_heads: int
) -> None:
    layer = LayerGeometry(kv_heads, 32, 32, window)
    case = PagedCase(layer, rows, heads, torch.bfloat16, block_tokens=4)
    attend(native, case)
    assert case.is_right(0.02)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("block_tokens", [4, 16, 32])
def test_attention_of_every_width(native: NativeLibrary, dim: int, block_tokens: int) -> None:
    layer = LayerGeometry(2, dim, dim)
    case = PagedCase(layer, MIXES[1], 4, torch.bfloat16, block_tokens=block_tokens, softcap=20.0)
    attend(native, case)
    assert case.is_right(0.02)


def test_attention_notices_what_is_wrong(native: NativeLibrary) -> None:
    """The comparison above would not pass with another scale, window or row."""
    for change in ("softcap", "window", "context"):
        case = PagedCase(LayerGeometry(2, 32, 32, 40), MIXES[0], 4, torch.bfloat16)
        if change == "softcap":
            case.softcap = 0.5
            attend(native, case)
            case.softcap = 0.0
        elif change == "window":
            case.geometry = type(case.geometry)(
                LayerGeometry(2, 32, 32, 20),
                case.geometry.block_tokens,
                case.geometry.dtype,
                case.geometry.unit_bytes,
            )
            attend(native, case)
            case.geometry = type(case.geometry)(
                LayerGeometry(2, 32, 32, 40),
                case.geometry.block_tokens,
                case.geometry.dtype,
                case.geometry.unit_bytes,
            )
        else:
            case.batch.rows[3].context_len.sub_(1)
            attend(native, case)
            case.batch.rows[3].context_len.add_(1)
        assert case.difference() > 0.05, change


def k_of(case: PagedCase, row: int, position: int, kv_head: int) -> torch.Tensor:
    """The K of one position, as it lies in the arena."""
    geometry, rows = case.geometry, case.batch.rows[row]
    block, within = divmod(position - int(rows.first[0]), geometry.block_tokens)
    unit = int(case.chunk_table[rows.chunk[0, block]])
    unit += int(rows.slot[0, block]) * geometry.block_units
    dim = geometry.layer.k_dim
    start = unit * geometry.unit_bytes + 2 * dim * (kv_head * geometry.block_tokens + within)
    return case.arena[start : start + 2 * dim].view(torch.bfloat16)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 4), (2, 0), (2, 69), (2, 199)])
def test_broken_memory_is_seen(
    native: NativeLibrary, place: tuple[int, int], broken: float
) -> None:
    """As in torch: a score that is no number makes the query's result none, and no other's."""
    case = PagedCase(LayerGeometry(2, 32, 32), [(1, 1), (5, 1), (200, 1)], 4, torch.bfloat16)
    row, position = place
    # Times |q| it is beyond all numbers whichever sign q has.
    k_of(case, row, position, 1).copy_(case.query[row, 3].sign() * broken)
    out = attend(native, case)
    wanted = case.expected()
    assert wanted[row, 3].isnan().all()
    assert torch.equal(out[:, 3].isnan(), wanted[:, 3].isnan())
    assert not out[:, :2].isnan().any()


def test_a_row_that_sees_nothing_is_zero(native: NativeLibrary) -> None:
    case = PagedCase(LayerGeometry(2, 32, 32), MIXES[0], 4, torch.bfloat16)
    wanted = case.expected()
    case.batch.rows[3].context_len.zero_()
    out = attend(native, case)
    assert not out[3].any()
    assert close(out[:3], wanted[:3], 0.02)


LONG: list[Row] = [(513, 1), (40, 1), (1100, 1), (5000, 1), (512, 1)]


def in_one_call(case: PagedCase) -> PagedRows:
    """NativeRows of one token that had a call each, in one, their tables padded."""
    calls = case.batch.rows
    longest = max(call.chunk.shape[1] for call in calls)

    def padded(tables: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([functional.pad(t, (0, longest - t.shape[1])) for t in tables])

    return PagedRows(
        torch.cat([call.token_index for call in calls]),
        padded([call.chunk for call in calls]),
        padded([call.slot for call in calls]),
        torch.cat([call.context_len for call in calls]),
        torch.cat([call.first for call in calls]),
    )


@pytest.mark.parametrize("window", [0, 600])
def test_long_rows_are_joined_of_parts(native: NativeLibrary, window: int) -> None:
    """And come out the same, to the last bit, alone, beside others, by any number of threads."""
    layer = LayerGeometry(2, 32, 32, window)
    case = PagedCase(layer, LONG, 14, torch.bfloat16, block_tokens=16)
    alone = attend(native, case).clone()
    assert case.is_right(0.02)
    case.batch = replace(case.batch, rows=(in_one_call(case),))
    for threads in (3, 1):
        native.set_threads(threads)
        case.out.fill_(torch.nan)
        assert torch.equal(attend(native, case), alone)
    native.set_threads(3)


@pytest.mark.parametrize("window", [0, 13, 600])
@pytest.mark.parametrize("context", [90, 1100])
def test_a_token_is_the_same_in_any_chunk(native: NativeLibrary, window: int, context: int) -> None:
    """To the bit: alone, as in a step, or with those before it, however a prompt was cut."""
    tokens = 70
    case = PagedCase(
        LayerGeometry(2, 32, 32, window), [(context, tokens)], 6, torch.bfloat16, block_tokens=16
    )
    whole = attend(native, case).clone()
    (rows,) = case.batch.rows
    for ends in ([*range(1, tokens + 1)], [1, 4, 37, 38, 69, 70], [33, 70]):
        pieces = [
            replace(
                rows,
                token_index=rows.token_index[:, begin:end].contiguous(),
                context_len=rows.context_len - (tokens - end),
            )
            for begin, end in pairwise([0, *ends])
        ]
        case.batch = replace(case.batch, rows=tuple(pieces))
        case.out.fill_(torch.nan)
        assert torch.equal(attend(native, case), whole)


@pytest.mark.parametrize("place", [(0, 0), (0, 512), (2, 513), (3, 4999)])
def test_broken_memory_is_seen_in_every_part(native: NativeLibrary, place: tuple[int, int]) -> None:
    case = PagedCase(LayerGeometry(2, 32, 32), LONG, 4, torch.bfloat16, block_tokens=16)
    row, position = place
    k_of(case, row, position, 1).fill_(torch.nan)
    out = attend(native, case)
    assert out[row, 3].isnan().all()
    assert not out[:, :2].isnan().any()
    out[row, 2:] = 0
    assert not out.isnan().any()


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_the_definitions(native: NativeLibrary, seed: int) -> None:
    """Also among equals, over a vocabulary that ends in the middle of everything, over poison."""
    generator = torch.Generator().manual_seed(seed)
    wide: tuple[dict[str, float], ...] = (
        {"top_k": 500},
        {"top_k": 900, "top_p": 0.8, "temperature": 4.0},
    )
    params = parameters((*KINDS, *wide), seed)
    spread = torch.randn(len(params), VOCAB + 7, generator=generator) * 3
    guards = Guards()
    logits = guards.input(spread.round() if seed % 3 == 0 else spread, row_gap=5)
    how = drawn_how(params, seed)
    tokens, broken = native.draw(logits, how)
    wanted, _ = draw_ref(logits, how)
    assert tokens.tolist() == wanted.tolist()
    assert not broken.any()
    guards.check()


def test_broken_rows_are_told_and_forbidden_tokens_never_drawn(native: NativeLibrary) -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(3))
    logits[1, 50], logits[2, 99], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5, :99] = -torch.inf
    how = drawn_how(parameters(({}, {}, {}, {"temperature": 0.0}, {}, {"top_p": 0.5}), 1), 1)
    tokens, broken = native.draw(logits, how)
    assert broken.tolist() == [False, True, True, False, True, False]
    assert tokens[5] == 99
    assert tokens[3] == logits[3].argmax()


FORKED = """
import os, sys, torch
from kernels.native_calls import AttentionForm, Cache, NativeLibrary, NativeRows
from pathlib import Path
native = NativeLibrary(Path(sys.argv[1]))
x, weight = torch.ones(3, 64).bfloat16(), torch.ones(400, 64).bfloat16()
assert bool((native.linear(x, weight) == 64).all()), "before the threads are said"
native.set_threads(3)
wanted = native.linear(x, weight)
child = os.fork()
assert torch.equal(native.linear(x, weight), wanted)
if child == 0:
    native.set_threads(2)
    assert torch.equal(native.linear(x, weight), wanted)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
# More pieces than a job's word has room for: the last row's result is its own.
rows, heads, dim = 2049, 512, 32
kv = torch.ones(2, heads, dim).bfloat16()
zeros = torch.zeros(rows, 1, dtype=torch.int64)
token, ones = zeros.clone(), torch.ones(rows, dtype=torch.int64)
token[-1] = 1
cache = Cache(kv.data_ptr(), zeros.data_ptr(), 2 * dim * heads, 2, 1, 1, heads, dim, 0)
call = NativeRows(*(t.data_ptr() for t in (token, zeros, zeros, ones, zeros)), rows, 1, 1)
out = torch.zeros(2, heads * dim).bfloat16()
query = torch.ones(2, heads * dim).bfloat16()
native.attention(cache, AttentionForm(heads, 1.0, 0.0), (NativeRows * 1)(call), query, out)
assert bool((out == 1).all())
"""


@pytest.mark.skipif(not BUILDS, reason="nothing was compiled")
def test_forks_and_more_pieces_than_fit_a_word() -> None:
    """In a process of its own, which would hang where a piece were lost or a thread waited for."""
    command = [sys.executable, "-c", FORKED, str(find(BUILDS[0]))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


EDGES = """
import ctypes, json, mmap, sys, torch
from pathlib import Path
from engine.registration.quantize import quantize_rows
from kernels import int4_blocks
from kernels.native_calls import NativeLibrary

protect = ctypes.CDLL(None).mprotect
protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Walled(torch.Tensor):
    def new_empty(self, *shape, dtype):
        return walled(torch.empty(shape, dtype=dtype))


def walled(tensor):
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    end = -(-size // page) * page
    room = mmap.mmap(-1, end + page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert protect(begin + end, page, 0) == 0
    flat = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel(), offset=end - size)
    return flat.view(tensor.shape).copy_(tensor).as_subclass(Walled)


for path in sys.argv[2:]:
    native = NativeLibrary(Path(path))
    native.set_threads(2)
    for num_rows, k, n in json.loads(sys.argv[1]):
        x, bias = walled(torch.ones(num_rows, k).bfloat16()), walled(torch.ones(n).bfloat16())
        plain = torch.ones(2 * n, k).bfloat16()
        rows, scale = quantize_rows(plain, torch.bfloat16)
        weights = [(plain, None, True), (rows, scale, True), (rows, scale, False)]
        if n % 16 == 0:
            weights.append((int4_blocks.quantize(plain), None, True))
        for weight, scale, rounding in weights:
            print(path, num_rows, k, n, weight.dtype, rounding, flush=True)
            how = {"rounding": rounding, "scale": None if scale is None else walled(scale)}
            pair = walled(weight)
            single = walled(weight[: len(weight) // 2])
            for wide in (False, True):
                native.linear(x, pair, activation="silu", wide=wide, **how)
                if scale is not None:
                    how["scale"] = walled(scale[:n])
                native.linear(x, single, bias, wide=wide, **how)
                how["scale"] = None if scale is None else walled(scale)
"""


@pytest.mark.skipif(not BUILDS, reason="nothing was compiled")
def test_nothing_behind_the_last_byte_is_touched() -> None:
    """Every buffer ends where memory ends; in a process of its own, which would be killed."""
    builds = [str(find(name)) for name in BUILDS]
    command = [sys.executable, "-c", EDGES, json.dumps(SIZES), *builds]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, (ended.stdout.splitlines()[-1:], ended.stderr)


def test_work_is_done_whoever_sleeps(native: NativeLibrary) -> None:
    """Threads that sleep at once and more of them than cores: many small jobs, none lost."""
    x, weight = random(3, 64), random(400, 64, seed=4)
    wanted = native.linear(x, weight)
    for threads, spin in ((1, 0), (2, 0), (6, 0), (6, 50), (3, 2000)):
        native.set_threads(threads, spin)
        for _ in range(300):
            assert torch.equal(native.linear(x, weight), wanted)
    native.set_threads(3)


def test_structures_are_as_large_as_in_cpp() -> None:
    """No holes that the two sides could fill unlike: every field lies at a multiple of its size."""
    for structure in (NativeRows, Cache, Norm):
        assert ctypes.sizeof(structure) % 8 == 0


def test_builds_by_processor() -> None:
    """The best first, and none with an instruction that the processor does not say it has."""
    bare, newer = AVX512, AVX512 | {"avx512_vnni"}
    newest = newer | {"avx512_bf16"}
    old = ["_native_avx512", "_native_avx2"]
    assert builds_for(Processor("GenuineIntel", bare)) == old
    assert builds_for(Processor("GenuineIntel", bare | {"avx512_bf16"})) == old
    assert builds_for(Processor("GenuineIntel", newer)) == ["_native_avx512_vnni", *old]
    names = ["_native_avx512_bf16", "_native_avx512_vnni", *old]
    assert builds_for(Processor("AuthenticAMD", newest)) == names
    names = ["_native_avx512_vnni", "_native_avx512", "_native_avx512_bf16", "_native_avx2"]
    assert builds_for(Processor("GenuineIntel", newest)) == names
    laptop = frozenset({"avx2", "fma", "f16c"})
    assert builds_for(Processor("GenuineIntel", laptop)) == ["_native_avx2"]
    assert builds_for(Processor("GenuineIntel", laptop | {"avx_vnni"}))[0] == "_native_avx2_vnni"
    assert builds_for(Processor("GenuineIntel", frozenset({"avx_vnni"}))) == []
    assert builds_for(Processor()) == []


def test_what_the_processor_says(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 fma\n\n"
        "processor\t: 1\nvendor_id\t: Other\nflags\t\t: none\n"
    )
    assert processor(cpuinfo) == Processor("AuthenticAMD", frozenset({"fpu", "avx2", "fma"}))
    assert processor(tmp_path / "nowhere") == Processor()
    cpuinfo.write_text("Hardware\t: something else\n")
    assert processor(cpuinfo) == Processor()
