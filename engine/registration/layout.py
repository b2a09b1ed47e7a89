"""Where a pack's tensors lie in its blob: pure arithmetic over names, shapes and dtypes.

Each decoder layer and the rest get a segment of their own. Within one, tensors follow the module
tree, except that projections of the same input stand directly behind one another (q, k, v; gate,
up), so that one product over all of them finds its matrix as a view of the same bytes. Such a
neighbourhood is a fused group; where sizes leave gaps between its members, it is none.

For tensor parallelism each tensor keeps its shard axis, from the library's own plan for the family
(colwise: outputs, rowwise: inputs), and where one tensor holds several projections their sizes, for
each of them has to be cut by itself.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from engine.modules.experts import linear_shape
from engine.modules.quantized import kept_dtype, kept_shape, scale_dtype
from engine.pack import (
    MEMBER_ALIGN,
    ROW_DTYPES,
    SCALE_SUFFIX,
    SEGMENT_ALIGN,
    TENSOR_ALIGN,
    FusedGroup,
    Segment,
    TensorEntry,
    is_one_run,
)
from engine.registration.blueprint import REST, Blueprint, layer_of

# Siblings that take the same input, as families call them, and the name of their joint product.
FUSABLE = (
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("query", "key", "value"), "qkv"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("w1", "w3"), "w13"),
)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the pack before it has a place."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes in the blob."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PackLayout:
    """What goes where."""

    segments: tuple[Segment, ...]
    tensors: tuple[TensorEntry, ...]
    fused: tuple[FusedGroup, ...]


def lay_out(
    plan: Blueprint,
    names: list[str],
    dtype: torch.dtype,
    schemes: Mapping[str, str] = MappingProxyType({}),
) -> PackLayout:
    """Place `names`: REST first, then the layers in order, each tensor TENSOR_ALIGNed;
    what may follow another in a fused group is MEMBER_ALIGNed.

    `schemes`: the weights among them that are quantized; those in int8 and fp8 have their scales
    behind them.
    """
    members: dict[str, list[str]] = {REST: []}
    for name in names:
        members.setdefault(layer_of(name), []).append(name)
    order = sorted(members, key=lambda segment: -1 if segment == REST else int(segment[6:]))
    groups = list(neighbours(plan, frozenset(names)))
    group_of = {name: group for group in groups for name in group.members}
    scales = [_scales(group) for group in groups]
    later = {name for group in (*groups, *scales) for name in group.members[1:]}
    styles = dict(getattr(plan.skeleton, "_tp_plan", None) or {})
    segments: list[Segment] = []
    entries: dict[str, TensorEntry] = {}
    start = 0
    for number, segment in enumerate(order):
        offset = 0
        for stored in _in_order(plan, members[segment], group_of, dtype, schemes):
            offset = _align(offset, MEMBER_ALIGN if stored.name in later else TENSOR_ALIGN)
            axis = _axis_of(plan, styles, stored)
            entries[stored.name] = TensorEntry(
                stored.name,
                number,
                offset,
                stored.num_bytes,
                stored.shape,
                str(stored.dtype).removeprefix("torch."),
                shard_axis=axis,
                parts=_parts(plan, stored, axis),
                scheme=stored.scheme,
            )
            offset += stored.num_bytes
        size = _align(offset, SEGMENT_ALIGN)
        segments.append(Segment(segment, start, size))
        start += size
    fused = tuple(group for group in (*groups, *scales) if is_one_run(group, entries))
    return PackLayout(tuple(segments), tuple(entries.values()), fused)


def _axis_of(plan: Blueprint, styles: dict[str, str], stored: Stored) -> int | None:
    """By the axes of the weight: blocks have one more, scales lack its last."""
    weight = stored.name if stored.name in plan.tensors else stored.name.removesuffix(SCALE_SUFFIX)
    num_axes = plan.tensors[weight].dim()
    axis = shard_axis(styles, stored.name, num_axes)
    is_scale = weight != stored.name
    return None if is_scale and axis == num_axes - 1 else axis


def shard_axis(styles: dict[str, str], name: str, num_axes: int) -> int | None:
    """The axis along which tensor parallelism cuts a tensor; None: every device has all of it.

    `styles`: the library's plan, by module or parameter name with "*" for every number.
    """
    generic = re.sub(r"\d+", "*", name.removesuffix(SCALE_SUFFIX))
    style = styles.get(generic) or styles.get(generic.rpartition(".")[0]) or ""
    if style.startswith("embedding"):
        return 0
    if "colwise" in style:
        return max(0, num_axes - 2)
    if "rowwise" in style and num_axes > 1:
        return num_axes - 1
    return None


def neighbours(plan: Blueprint, names: frozenset[str]) -> Iterator[FusedGroup]:
    """Those of `names` that are to lie behind one another, as groups."""
    for prefix, module in plan.skeleton.named_modules():
        children = dict(module.named_children())
        for leaves, label in FUSABLE:
            found = [children.get(leaf) for leaf in leaves]
            linears = [child for child in found if type(child) is nn.Linear]
            if len(linears) < len(leaves) or len({child.in_features for child in linears}) > 1:
                continue
            dot = f"{prefix}." if prefix else ""
            for kind in ("weight", "bias"):
                members = tuple(f"{dot}{leaf}.{kind}" for leaf in leaves)
                if names.issuperset(members):
                    yield FusedGroup(f"{dot}{label}.{kind}", members)


def _in_order(
    plan: Blueprint,
    names: list[str],
    group_of: dict[str, FusedGroup],
    dtype: torch.dtype,
    schemes: Mapping[str, str],
) -> Iterator[Stored]:
    """The tensors of one segment: a group's members one after the other, then their scales."""
    done: set[str] = set()
    for name in names:
        if name in done:
            continue
        run = group_of[name].members if name in group_of else (name,)
        done.update(run)
        for member in run:
            scheme = schemes.get(member, "")
            if scheme:
                shape = kept_shape(linear_shape(plan.skeleton, member), scheme)
                yield Stored(member, shape, kept_dtype(scheme), scheme)
            else:
                shape = tuple(plan.tensors[member].shape)
                yield Stored(member, shape, plan.dtype_of(member, dtype))
        for member in run:
            scheme = schemes.get(member, "")
            if scheme in ROW_DTYPES:
                rows = linear_shape(plan.skeleton, member)[:-1]
                yield Stored(member + SCALE_SUFFIX, rows, scale_dtype(scheme, dtype))


def _scales(group: FusedGroup) -> FusedGroup:
    """The group of its members' scales."""
    names = tuple(name + SCALE_SUFFIX for name in group.members)
    return FusedGroup(group.name + SCALE_SUFFIX, names, group.axis)


def _parts(plan: Blueprint, stored: Stored, axis: int | None) -> tuple[int, ...]:
    """Sizes along the axis where the tensor holds several projections, else ()."""
    leaf = stored.name.split(".")[-2] if stored.name.count(".") else ""
    if axis is None:
        return ()
    size = stored.shape[axis]
    if "gate_up_proj" in stored.name.split(".")[-2:]:
        return (size // 2, size // 2) if size % 2 == 0 else ()
    if leaf == "qkv_proj":
        layer = layer_of(stored.name)
        for group in plan.kv_groups:
            if layer != REST and int(layer[6:]) in group.layers:
                keys, values = group.num_kv_heads * group.k_dim, group.num_kv_heads * group.v_dim
                return (size - keys - values, keys, values) if size > keys + values else ()
    return ()


def _align(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
