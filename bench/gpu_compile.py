"""What bench.gpu launches, through Triton's own JIT for a GPU that is not there: compiled, not run.

    python -m bench.gpu_compile [--arch 90] [--only TEXT]

`kernels.aot` compiles what modules declare; here it is what steps launch. The launchers are given
tensors of true shapes in the processor's memory, Triton specializes by their addresses, strides and
numbers as it does on a GPU, and compiles where it would launch. So this finds what a first run on a
GPU would find after minutes: an argument that the JIT of another version refuses, a form that does
not fit into shared memory, more variants of a kernel than were meant.

Nothing computes: products give memory as it comes. A process of its own, for Triton's driver is
exchanged; needs no GPU, no driver and no weights.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.expert_cases import MIXTURES, TOKENS, Mixture
from bench.gpu_models import LARGE, MEDIUM, SMALL, shape_of
from bench.gpu_parity import FAMILIES, SIZES
from kernels import dependent
from kernels.aot import WARP, Compiled, compiled_as
from kernels.decoder_layer import (
    KERNELS,
    LayerForm,
    LayerStep,
    LayerWeights,
    Product,
    decoder_layer,
)
from kernels.expert_mlp import ExpertStack
from kernels.expert_products import expert_mlp
from kernels.few_rows import takes
from kernels.gate_mul import Activation
from kernels.paged_attention import BlockGeometry, LayerGeometry, PagedBatch, largest_unit_bytes
from kernels.paged_decode import choose_splits
from kernels.paged_prefill import tiles_of
from kernels.paged_rows import FlatRows
from kernels.prefill_shape import HOPPER, launch_shape
from kernels.sampling import Draw, draw
from kernels.triton_api import HAS_TRITON

if HAS_TRITON:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

DTYPE = torch.bfloat16
PAGE_BYTES = 2 << 20
BLOCK_TOKENS = 16
MULTIPROCESSORS = 132
ROWS = (1, 3, 256)
ARCHS = (90, 100)
"""Launchers that find no GPU take Hopper's shapes, which are Blackwell's too, and no Ampere's."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that decode over tables of `width` blocks, and (tokens, context) of rows of chunks."""

    num_decodes: int
    width: int
    chunks: tuple[tuple[int, int], ...] = ()


STEPS = (
    Step(1, 16),
    Step(1, 64),
    Step(8, 16),
    Step(64, 64),
    Step(64, 256),
    Step(256, 16),
    Step(200, 16, ((128, 128),)),
    Step(3, 32, ((40, 200), (33, 37))),
    Step(0, 0, ((2048, 2048),)),
)


@dataclass(frozen=True, slots=True)
class Model:
    """One layer's shape, and the vocabulary."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    window: int = 0
    head_norms: bool = False
    bias: bool = False
    unit_offset: bool = False
    activation: Activation = "silu"


def models() -> list[Model]:
    """Of the parts that have figures, and of the families whose tokens are compared."""
    shapes = [shape_of(name, dry=False) for name in (SMALL, MEDIUM, LARGE)]
    made = [_model(shape["model_type"], shape) for shape in shapes]
    return made + [_model(family, SIZES | options) for family, options in FAMILIES.items()]


def _model(family: str, shape: Any) -> Model:
    gemma = family.startswith("gemma")
    heads = shape["num_attention_heads"]
    return Model(
        f"{family} {shape['hidden_size']}",
        shape["hidden_size"],
        shape["intermediate_size"],
        heads,
        shape["num_key_value_heads"],
        shape.get("head_dim") or shape["hidden_size"] // heads,
        shape["vocab_size"],
        window=shape.get("sliding_window") or 0,
        head_norms=family in ("qwen3", "gemma3_text"),
        bias=family == "qwen2",
        unit_offset=gemma,
        activation="gelu_tanh" if gemma else "silu",
    )


class _Nowhere:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Never launched into."""
        return device

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return GPUTarget("cuda", self._arch, WARP)


@contextmanager
def compiling(arch: int) -> Iterator[Callable[[str], list[Compiled]]]:
    """Launches inside are compiled. Gives a function: what is new since its last call, by name."""
    known: set[int] = set()
    fresh: list[tuple[str, Any]] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def compile_only(*args: Any, **options: Any) -> None:
            made = kernel.run(*args, grid=grid, warmup=True, **options)
            made = made.result() if hasattr(made, "result") else made
            if id(made) not in known:  # the JIT keeps it, so the number stays its own
                known.add(id(made))
                fresh.append((kernel.__name__, made))

        return compile_only

    def taken(label: str) -> list[Compiled]:
        for name, made in fresh:
            check_waits(name, made.asm["ptx"])
        found = [compiled_as(f"{label} {name}", arch, made) for name, made in fresh]
        fresh.clear()
        return found

    driver.set_active(_Nowhere(arch))
    original, can_depend = JITFunction.__getitem__, dependent.can_depend
    JITFunction.__getitem__ = launcher
    dependent.can_depend = lambda device: arch >= HOPPER  # type: ignore[assignment]
    try:
        yield taken
    finally:
        JITFunction.__getitem__ = original
        dependent.can_depend = can_depend


def check_waits(name: str, ptx: str) -> None:
    """Raises ValueError where a dependent launch reads or writes before it has waited.

    But for the weights that products of few rows ask for, and which experts' (expert_rows.py).
    """
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    early = "st|atom|red" if name in ("_few_rows_kernel", "_down_kernel") else "ld|st|atom|red"
    if waits and re.search(rf"\b({early})\.global", before):
        raise ValueError(f"{name} reads or writes before it waits")


def launch_layer(model: Model, step: Step, arch: int) -> None:
    """Two layers of one step: the first of a model and any other."""
    layer = LayerGeometry(model.kv_heads, model.head_dim, model.head_dim, model.window)
    unit = largest_unit_bytes(layer, DTYPE, PAGE_BYTES)
    num_tokens = step.num_decodes + sum(tokens for tokens, _ in step.chunks)
    table, place = torch.zeros(1024, dtype=torch.int64), _ints(num_tokens)
    angles = _empty(1, num_tokens, model.head_dim)[0, :, : model.head_dim // 2]
    prefill = tiles = None
    if step.chunks:
        width = max(-(-context // BLOCK_TOKENS) for _, context in step.chunks)
        prefill = _rows(len(step.chunks), -(-width // 16) * 16, step.chunks)
        block_m = launch_shape(layer, arch).block_m
        tiles = tiles_of(prefill, model.heads // model.kv_heads, block_m)
    decode, splits = None, 1
    if step.num_decodes:
        decode = _rows(step.num_decodes, step.width, [(1, 1)] * step.num_decodes)
        programs, longest = step.num_decodes * model.kv_heads, step.width * BLOCK_TOKENS
        splits = choose_splits(programs, longest, MULTIPROCESSORS)
    where = LayerStep(
        torch.zeros(PAGE_BYTES, dtype=torch.uint8),
        BlockGeometry(layer, BLOCK_TOKENS, DTYPE, unit),
        table,
        PagedBatch(table[None], place, place, place, ()),
        angles,
        angles,
        rows=prefill,
        tiles=tiles,
        num_splits=splits,
        decode=decode,
    )
    x, form = _empty(num_tokens, model.hidden), _form(model)
    operations = replace(KERNELS, product=_few_or_none)
    for residual in (None, _empty(num_tokens, model.hidden)):
        decoder_layer(x, residual, _weights(model), form, where, operations)


def launch_experts(mixture: Mixture, num_tokens: int) -> None:
    """The experts of one layer."""
    experts, size, inner = mixture.num_experts, mixture.size, mixture.inner
    turned = mixture.is_gpt_oss
    stack = ExpertStack(
        _empty(experts, size, 2 * inner) if turned else _empty(experts, 2 * inner, size),
        _empty(experts, inner, size) if turned else _empty(experts, size, inner),
        gate_up_bias=_empty(experts, 2 * inner) if turned else None,
        down_bias=_empty(experts, size) if turned else None,
        transposed=turned,
        interleaved=turned,
        limit=7.0 if turned else None,
    )
    ids = torch.zeros(num_tokens, mixture.top_k, dtype=torch.int64)
    expert_mlp(_empty(num_tokens, size), ids, _empty(num_tokens, mixture.top_k), stack)


def launch_sampling(model: Model, num_rows: int) -> None:
    """Rows that are drawn, none of which and all of which cut a tail."""
    floats, wide = torch.zeros(num_rows), torch.zeros(num_rows, dtype=torch.float64)
    logits, limit = torch.empty(num_rows, model.vocab_size), _ints(num_rows)
    for num_cut in (0, num_rows):
        cut = torch.zeros(num_cut, dtype=torch.int64)
        draw(logits, Draw(floats, wide, floats, limit, wide, cut))


def _form(model: Model) -> LayerForm:
    return LayerForm(
        model.heads,
        model.kv_heads,
        model.head_dim,
        1e-6,
        model.head_dim**-0.5,
        model.activation,
        unit_offset=model.unit_offset,
    )


def _weights(model: Model) -> LayerWeights:
    out = (model.heads + 2 * model.kv_heads) * model.head_dim
    norm = _empty(model.hidden)
    of_head = _empty(model.head_dim) if model.head_norms else None
    return LayerWeights(
        norm,
        Product(_empty(out, model.hidden), _empty(out) if model.bias else None),
        Product(_empty(model.hidden, model.heads * model.head_dim)),
        norm,
        Product(_empty(2 * model.intermediate, model.hidden)),
        Product(_empty(model.hidden, model.intermediate)),
        of_head,
        of_head,
    )


def _few_or_none(x: torch.Tensor, product: Product) -> torch.Tensor:
    """Products of many rows are the vendor's library's."""
    assert isinstance(product.weight, torch.Tensor)
    if takes(x, product.weight):
        return KERNELS.product(x, product)
    return x.new_empty(len(x), len(product.weight))


def _rows(num_rows: int, width: int, rows: Sequence[tuple[int, int]]) -> FlatRows:
    """`rows`: tokens and context of each."""
    lengths, contexts = zip(*rows, strict=True)
    table, each = _ints(num_rows, width), _ints(num_rows)
    return FlatRows(table, table, each, each, each, each, lengths, contexts)


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPE)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is new with each model; 1 where anything breaks a limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_compile")
    parser.add_argument("--arch", type=int, default=90, choices=ARCHS)
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args(argv)
    if not HAS_TRITON:
        print("Triton is not installed: install the extra `cuda` or `dev`", file=sys.stderr)
        return 2
    done: list[Compiled] = []
    with compiling(options.arch) as taken:
        for model in models():
            if options.only not in model.name:
                continue
            for step in STEPS:
                launch_layer(model, step, options.arch)
            for num_rows in ROWS:
                launch_sampling(model, num_rows)
            new = taken(model.name)
            done += new
            print("\n".join(one.line() for one in new), flush=True)
        for mixture in MIXTURES:
            if options.only not in mixture.name:
                continue
            for num_tokens in (3, *TOKENS):
                launch_experts(mixture, num_tokens)
            new = taken(mixture.name)
            done += new
            print("\n".join(one.line() for one in new), flush=True)
    faults = [fault for one in done for fault in one.faults()]
    print(f"{len(done)} kernels", *faults, sep="\n")
    return 1 if faults or not done else 0


if __name__ == "__main__":
    sys.exit(main())
