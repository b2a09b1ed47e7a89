"""A llama-like decoder layer as nine calls over a flat batch of tokens and a paged cache.

    1  residual += m x;  y = norm(residual)          rms_norm
    2  qkv = y Wqkv + b                              a product (plain, int8, fp8, int4)
       q, k = norms of their heads                   head_norm, where there are any (Qwen3)
    3  q, k rotated; k, v into the cache             kv_write
    4  a = attention of q over the cache             paged_decode (and a join) or paged_prefill
    5  x = a Wo + b                                  a product
    6  residual += m x;  y = norm(residual)          rms_norm
    7  g = y Wgate|up                                a product
    8  h = act(gate) up                              gate_mul
    9  x = h Wdown                                   a product

One to four rows of plain weights take six: 1 and 2 are one launch, 6 to 8 another (few_rows.py).

The layer takes (x, residual) and gives (x, residual), the last product not yet added: the next
layer's first call does that, and after the last layer the model's own norm. The first layer takes
the embeddings as x and no residual.

Covers pre-norm layers with fused or fusable q, k, v and gate, up: llama, qwen2 (biases), qwen3
(head norms), mistral (windows), phi3 (fused as they come), granite (multipliers), olmo (norms that
centre, without weights), gemma's norm and GELU. Where layers of these families have experts,
a module with its router stands in place of 7 to 9 (`LayerWeights.mlp`), and calls `experts`. Not:
norms after the branches (olmo2, gemma2), parallel branches.

`REFERENCE` and `KERNELS` are the same nine operations; a layer runs on either. Tensors' shapes are
their modules'. Nothing here waits for the device or looks at it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kernels.expert_mlp import ExpertStack, expert_mlp_ref
from kernels.expert_products import expert_mlp
from kernels.few_rows import InputNorm, few_rows, takes
from kernels.fp8_linear import fp8_linear
from kernels.fp8_linear import takes as takes_fp8
from kernels.gate_mul import Activation, gate_mul, gate_mul_ref
from kernels.head_norm import head_norm_, head_norm_ref_
from kernels.int4_blocks import INT4_BLOCKS, int4_blocks_linear, int4_blocks_linear_ref
from kernels.int4_layouts import Int4Weight
from kernels.int4_linear import int4_linear, int4_linear_ref
from kernels.kv_write import rotary_write, rotary_write_ref
from kernels.paged_attention import BlockGeometry, PagedBatch, paged_attention_ref
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.paged_rows import FlatRows
from kernels.rms_norm import rms_norm, rms_norm_ref
from kernels.scaled_linear import scaled_linear, scaled_linear_ref


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W^T + bias. weight [n, k]: a float tensor; int8 or fp8 with `scale` [n]; int4, as
    blocks (uint8) of the form that `scheme` names in int4_blocks.py, or in the layout of GPUs."""

    weight: torch.Tensor | Int4Weight
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    scheme: str = INT4_BLOCKS


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: rows of q, k, v in this order; gate_up: of gate, up. Norms None where they have none.
    `mlp`: what stands in place of gate_up and down, which are empty then."""

    input_norm: torch.Tensor | None
    qkv: Product
    out: Product
    post_norm: torch.Tensor | None
    gate_up: Product
    down: Product
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    mlp: torch.nn.Module | None = None


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What a family's layer is, beside its weights. `scale` is that of attention's scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: Activation = "silu"
    residual_multiplier: float = 1.0
    unit_offset: bool = False
    center: bool = False
    softcap: float = 0.0
    interleaved: bool = False
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Where a step's tokens are in one layer's cache, and the angles of their positions.

    cos, sin [T, rotary_dim / 2], None: nothing is rotated. rows, tiles and num_splits are what the
    kernels want to know: `paged_rows.flat_rows`, `paged_prefill.tiles_of`; a step whose rows have
    one token each decodes. `decode`: such rows beside others, attending in a launch of their own.
    """

    arena: torch.Tensor
    geometry: BlockGeometry
    chunk_table: torch.Tensor
    batch: PagedBatch
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    rows: FlatRows | None = None
    tiles: torch.Tensor | None = None
    num_splits: int = 1
    decode: FlatRows | None = None


@dataclass(frozen=True, slots=True)
class Operations:
    """The calls of a layer, by one implementation.

    experts: a mixture's, as `expert_mlp_ref`; its module calls it behind the router.
    few_rows: norm, product and gate as one call, for what `few_rows.takes`; or None.
    """

    norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    product: Callable[[torch.Tensor, Product], torch.Tensor]
    head_norm_: Callable[..., None]
    write: Callable[..., torch.Tensor]
    attend: Callable[[torch.Tensor, LayerForm, LayerStep], torch.Tensor]
    gate_mul: Callable[[torch.Tensor, Activation], torch.Tensor]
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertStack], torch.Tensor]
    few_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None


def decoder_layer(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: LayerWeights,
    form: LayerForm,
    step: LayerStep,
    operations: Operations,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, residual), each [T, hidden], to the same of the next layer; K and V are written."""
    qkv, residual = _normed_product(x, residual, weights.input_norm, weights.qkv, form, operations)
    if weights.q_norm is not None:
        operations.head_norm_(
            qkv,
            weights.q_norm,
            weights.k_norm,
            form.num_heads,
            form.num_kv_heads,
            form.eps,
            form.unit_offset,
        )
    query = operations.write(*split_heads(qkv, form), form, step)
    attended = operations.attend(query, form, step)
    x = operations.product(attended.view(len(qkv), -1), weights.out)
    if weights.mlp is not None:
        y, residual = _normed(x, residual, weights.post_norm, form, operations)
        return weights.mlp(y[None])[0], residual
    hidden, residual = _normed_product(
        x, residual, weights.post_norm, weights.gate_up, form, operations, form.activation
    )
    return operations.product(hidden, weights.down), residual


def _normed_product(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    product: Product,
    form: LayerForm,
    operations: Operations,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm and its product, and the gate of it with an activation; and the new residual."""
    weight = product.weight
    few = operations.few_rows
    if few is not None and isinstance(weight, torch.Tensor) and takes(x, weight, normed=True):
        how = InputNorm(norm_weight, form.eps, **_norm_options(form))
        return few(x, weight, product.bias, how, residual, activation)
    y, residual = _normed(x, residual, norm_weight, form, operations)
    y = operations.product(y, product)
    return (y if activation is None else operations.gate_mul(y, activation)), residual


def _normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    form: LayerForm,
    operations: Operations,
) -> tuple[torch.Tensor, torch.Tensor]:
    return operations.norm(x, norm_weight, form.eps, residual, **_norm_options(form))


def _norm_options(form: LayerForm) -> dict[str, Any]:
    return {
        "multiplier": form.residual_multiplier,
        "unit_offset": form.unit_offset,
        "center": form.center,
    }


def split_heads(
    qkv: torch.Tensor, form: LayerForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, (heads + 2 kv_heads) dim] as views: q, k, v [T, their heads, dim]."""
    heads = qkv.view(len(qkv), -1, form.head_dim)
    keys = form.num_heads + form.num_kv_heads
    return heads[:, : form.num_heads], heads[:, form.num_heads : keys], heads[:, keys:]


def _product_ref(x: torch.Tensor, product: Product) -> torch.Tensor:
    if isinstance(product.weight, Int4Weight):
        return int4_linear_ref(x, product.weight, product.bias)
    if product.scale is not None:
        return scaled_linear_ref(x, product.weight, product.scale, product.bias)
    if product.weight.dtype == torch.uint8:
        return int4_blocks_linear_ref(x, product.weight, product.bias, product.scheme)
    return functional.linear(x, product.weight, product.bias)


def _product(x: torch.Tensor, product: Product) -> torch.Tensor:
    """A plain product of many rows is the vendor's library's: nothing fused into it would pay."""
    if isinstance(product.weight, Int4Weight):
        return int4_linear(x, product.weight, product.bias)
    if product.scale is not None:
        multiply = fp8_linear if takes_fp8(x, product.weight) else scaled_linear
        return multiply(x, product.weight, product.scale, product.bias)
    if product.weight.dtype == torch.uint8:
        return int4_blocks_linear(x, product.weight, product.bias, product.scheme)
    if takes(x, product.weight):
        return few_rows(x, product.weight, product.bias)[0]
    return functional.linear(x, product.weight, product.bias)


def _write_ref(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: LayerForm, step: LayerStep
) -> torch.Tensor:
    return rotary_write_ref(
        step.arena,
        step.geometry,
        step.chunk_table,
        step.batch,
        query,
        key,
        value,
        step.cos,
        step.sin,
        form.interleaved,
    )


def _write(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: LayerForm, step: LayerStep
) -> torch.Tensor:
    """Rotates q where it lies."""
    rotary_write(
        step.arena,
        step.geometry,
        step.chunk_table,
        step.batch,
        query,
        query,
        key,
        value,
        step.cos,
        step.sin,
        form.interleaved,
    )
    return query


def _attend_ref(query: torch.Tensor, form: LayerForm, step: LayerStep) -> torch.Tensor:
    return paged_attention_ref(
        step.arena,
        step.geometry,
        step.chunk_table,
        step.batch,
        query.transpose(0, 1),
        form.scale,
        form.softcap,
        form.sinks,
    )


def _attend(query: torch.Tensor, form: LayerForm, step: LayerStep) -> torch.Tensor:
    rows, decode = step.rows, step.decode
    out = query.new_empty(len(query), form.num_heads, step.geometry.layer.v_dim)
    if decode is None and rows is not None and max(rows.q_lens, default=2) == 1:
        rows, decode = None, rows
    if rows is None and decode is None:
        raise ValueError("the kernels want the step's rows laid out flat")
    cache, how = (step.arena, step.geometry, step.chunk_table), (form.scale, form.softcap)
    if decode is not None:
        splits = step.num_splits
        paged_decode(*cache, decode, query, out, *how, form.sinks, num_splits=splits)
    if rows is not None:
        if step.tiles is None:
            raise ValueError("rows of several tokens want tiles")
        paged_prefill(*cache, rows, step.tiles, query, out, *how, form.sinks)
    return out


REFERENCE = Operations(
    rms_norm_ref,
    _product_ref,
    head_norm_ref_,
    _write_ref,
    _attend_ref,
    gate_mul_ref,
    expert_mlp_ref,
)
KERNELS = Operations(
    rms_norm, _product, head_norm_, _write, _attend, gate_mul, expert_mlp, few_rows
)
