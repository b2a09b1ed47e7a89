"""Sparse attention (DSA): an indexer beside attention chooses the positions that a query sees.

An indexer keeps one key of d values a token, which all its heads share, and scores a query's heads
against it (DeepSeek-V3.2):

    score_ij = sum_h w_ih relu(q_ih . k_j)       the `index_topk` best j <= i are seen

MiniMax M3 scores K heads' blocks of positions instead, and each KV head sees its own choice.

The keys are KV of a layer of their own, of one head and without V (`indexer_layer`), in blocks that
hold K alone: so pages, prefixes, moves, prices and leases count them as they count all KV.

transformers' indexers ask the library's cache for the keys (`update_indexer`, `update_index`) and
take a mask; they do not look beyond one sequence otherwise. On the instance their forward is
exchanged for one that calls it

    once for all tokens, until it hands over the new keys, which are written to their pages; and
    for each group of rows whose context is longer than what is chosen of it, some queries at a
    time, with the keys of the context: scores take PIECE_BYTES at most, however long a prompt is.

What is chosen goes to attention as the library's modules hand it on (`indices`, `block_indices`),
also to later layers that share it. Rows with short contexts attend to everything, without scores.

An indexer is found by what its code asks its cache for, never by its name. Does not know steps.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.memory import KvPlan
from engine.modules.latent import absorb, attend_latents, is_latent, project
from engine.modules.state_mixers import cache_of, modules_using
from engine.pack import indexer_layer
from kernels.paged_attention import (
    BlockGeometry,
    LayerGeometry,
    PagedBatch,
    Rows,
    gather_kv_ref,
    paged_attention_ref,
    write_kv_ref,
)
from kernels.sparse_attention import Chosen, attend_chosen_ref, pieces

_PROTOCOL = frozenset({"update_indexer", "update_index"})
_KEYS = ("wk", "k_proj")
_POOLED = "index_kpool"
SCORE_TENSORS = 3
"""Of the size of all heads' scores, alive at once."""
NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""What such an attention module is given for a mask: it is cut, and nobody reads it."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """One of a model's.

    width   of a key
    reach   positions that are chosen at most: a query with no longer a context sees all of it
    unit    positions that are chosen together
    heads   that score
    """

    layer: int
    width: int
    reach: int
    unit: int
    heads: int


def indexers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of those that keep keys of their layer."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in modules_using(model, _PROTOCOL):
        yield names[id(module)], module


def read_indexer(module: Any) -> Indexer | None:
    """Its measures; None: it is not built as expected."""
    keys = next((getattr(module, name, None) for name in _KEYS if hasattr(module, name)), None)
    measures = (
        getattr(module, "head_dim", None),
        getattr(module, "index_topk", None) or getattr(module, "topk_blocks", None),
        getattr(module, "block_size", 1),
        getattr(module, "n_heads", None) or getattr(module, "num_heads", None),
    )
    if not all(isinstance(value, int) for value in measures) or hasattr(module, _POOLED):
        return None
    width, chosen, unit, heads = (int(value) for value in measures if value is not None)
    if getattr(keys, "out_features", None) != width:
        return None
    return Indexer(module.layer_idx, width, chosen * unit, unit, heads)


def has_indexers(model: nn.Module) -> bool:
    """Whether some layer chooses what it sees."""
    return next(indexers(model), None) is not None


def key_geometry(width: int) -> LayerGeometry:
    """What an indexer keeps."""
    return LayerGeometry(1, width, width, v_in_k=True)


def indexer_linears(model: nn.Module) -> frozenset[str]:
    """Names of the indexers' weights, which stay as they are: some read their dtype, and a choice
    is a step, so that rounding would choose other positions. They are 1 % of such a model."""
    return frozenset(
        f"{name}.{path}.weight"
        for name, module in indexers(model)
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear)
    )


@dataclass(frozen=True, slots=True)
class Pages:
    """The KV of a step: what attention knows of it (`StepContext`)."""

    arena: torch.Tensor
    plan: KvPlan
    groups: tuple[PagedBatch, ...]

    def of(self, layer: int) -> tuple[BlockGeometry, torch.Tensor, PagedBatch]:
        """Geometry, row of the table and batch of a layer."""
        group, place = self.plan.layer_group[layer]
        batch = self.groups[group]
        return self.plan.groups[group].block, batch.table[place], batch


def run_indexers(model: nn.Module, pages: Callable[[], Pages]) -> None:
    """They choose among the rows of the step that `pages` has from now on."""
    for _, module in indexers(model):
        measures = read_indexer(module)
        if measures is not None:
            module.forward = _PagedIndexer(module, measures, pages)
    for module in model.modules():
        if isinstance(getattr(module, "indexer", None), nn.Module):
            module.register_forward_pre_hook(_give_mask, with_kwargs=True)


def _give_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("attention_mask") is None:
        kwargs = {**kwargs, "attention_mask": NO_MASK}
    return args, kwargs


class _KeysGiven(Exception):
    """Leaves an indexer's forward when it has handed over its keys."""


class _Keys:
    """Stands for the library's cache: `take` gets the new keys [..., n, d], and gives all."""

    def __init__(self, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._take = take

    @property
    def layers(self) -> "dict[int, _Keys]":
        """Some ask the layer."""
        return _Always(self)

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """[R, n, d] to [R, S, d]."""
        return self._take(keys)

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """[R, 1, n, d] to [R, 1, S, d]."""
        return self._take(keys[:, 0])[:, None]


class _Always(dict[int, _Keys]):
    """One for every layer."""

    def __init__(self, one: _Keys) -> None:
        super().__init__()
        self._one = one

    def __missing__(self, layer: int) -> _Keys:
        return self._one


class _PagedIndexer:
    """The forward of an indexer over pages."""

    def __init__(self, module: Any, measures: Indexer, pages: Callable[[], Pages]) -> None:
        self._measures = measures
        self._forward: Callable[..., torch.Tensor] = module.forward
        self._signature = inspect.signature(module.forward)
        self._hidden = next(iter(self._signature.parameters))
        self._cache = cache_of(self._signature)
        self._pages = pages

    def __call__(self, *args: Any, **kwargs: Any) -> Chosen:
        """hidden [1, T, H] and what belongs to it -> what the tokens see."""
        given = self._signature.bind(*args, **kwargs)
        where = self._pages().of(indexer_layer(self._measures.layer))
        write = partial(self._write, where)
        with contextlib.suppress(_KeysGiven):
            self._call(given, None, None, _Keys(write))
        return Chosen(tuple(self._choose(given, where, rows) for rows in where[2].rows))

    def _write(
        self, where: tuple[BlockGeometry, torch.Tensor, PagedBatch], keys: torch.Tensor
    ) -> torch.Tensor:
        geometry, table, batch = where
        flat = keys[0, :, None].to(geometry.dtype)
        write_kv_ref(self._pages().arena, geometry, table, batch, flat, flat)
        raise _KeysGiven

    def _choose(
        self,
        given: inspect.BoundArguments,
        where: tuple[BlockGeometry, torch.Tensor, PagedBatch],
        rows: Rows,
    ) -> torch.Tensor | None:
        """As in `Chosen`."""
        if int(rows.context_len.max()) <= self._measures.reach:
            return None
        geometry, table, _ = where
        keys, _ = gather_kv_ref(self._pages().arena, geometry, table, rows)
        num_rows, q_len = rows.token_index.shape
        span = torch.arange(keys.shape[2], device=keys.device)
        last = rows.context_len[:, None] - q_len + torch.arange(q_len, device=keys.device)
        chosen: torch.Tensor | None = None
        each = SCORE_TENSORS * 4 * self._measures.heads * len(span)
        for row, part in pieces(num_rows, q_len, each):
            known = _Keys(partial(_instead, keys[row, 0]))
            seen = span <= last[row, part, None]
            index = rows.token_index[row, part]
            found = self._call(given, index, seen, known)
            found = self._positions(found, last[row, part])
            if chosen is None:
                shape = (num_rows, found.shape[1], q_len, found.shape[3])
                chosen = found.new_empty(shape, dtype=torch.int32)
            chosen[row, :, part] = found
        return chosen

    def _positions(self, found: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """[R, n, k], or [R, heads, n, k] of units, to positions [R, 1 or heads, n, k]."""
        if found.dim() == 3:
            found = found[:, None]
        unit = self._measures.unit
        if unit > 1:
            inside = torch.arange(unit, device=found.device)
            units = found[..., None]
            found = (units * unit + inside).masked_fill(units < 0, -1).flatten(3)
        return found.masked_fill(found > last[:, None, :, None], -1)

    def _call(
        self,
        given: inspect.BoundArguments,
        index: torch.Tensor | None,
        mask: torch.Tensor | None,
        keys: _Keys,
    ) -> torch.Tensor:
        """Of the tokens at `index` [R, n]; None: of all."""
        num_tokens = given.arguments[self._hidden].shape[1]
        arguments = dict(given.arguments)
        if index is not None:
            arguments = {name: _cut(value, index, num_tokens) for name, value in arguments.items()}
        if "attention_mask" in self._signature.parameters:
            arguments["attention_mask"] = NO_MASK[0] if mask is None else mask
        arguments[self._cache] = keys
        return self._forward(**arguments)


def _instead(known: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The keys of the context, which are in their pages, the new ones too."""
    return known


def _cut(value: Any, index: torch.Tensor, num_tokens: int) -> Any:
    """What is of tokens, [1, T, ...], to [R, n, ...]."""
    if isinstance(value, tuple):
        return tuple(_cut(part, index, num_tokens) for part in value)
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value[0][index]
    return value


def attend_sparse(
    module: Any,
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    batch: PagedBatch,
    query: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    chosen: Chosen,
) -> torch.Tensor:
    """query [heads, T, dim] of a flat batch -> [T, heads, v_dim] over what is chosen."""
    pairs = list(zip(batch.rows, chosen.by_rows, strict=True))
    whole = replace(batch, rows=tuple(rows for rows, positions in pairs if positions is None))
    where = (arena, geometry, chunk_table)
    if is_latent(module):
        out = attend_latents(module, *where, whole, query, scale, softcap, sinks)
    else:
        out = paged_attention_ref(*where, whole, query, scale, softcap, sinks)
    for rows, positions in pairs:
        if positions is None:
            continue
        num_rows, q_len = rows.token_index.shape
        own = query[:, rows.token_index.flatten()]
        if is_latent(module):
            own = absorb(module, own)
        own = own.view(len(own), num_rows, q_len, -1).transpose(0, 1)
        attended = attend_chosen_ref(*where, rows, positions, own, scale, softcap, sinks)
        flat = attended.transpose(0, 1).flatten(1, 2)  # [heads, R * q_len, dim]
        if is_latent(module):
            flat = project(module, flat)
        out[rows.token_index.flatten()] = flat.transpose(0, 1)
    return out
