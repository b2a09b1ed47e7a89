"""From the names in a checkpoint's files to the names of the model's modules, one tensor at a time.

Registration's third step. Applies transformers' own renamings and conversions (experts stacked,
fused projections split), so that a pack holds what `from_pretrained` would have put into the model.
What is copied as it is comes in pieces of some rows; a conversion is run for one target at a time:
memory holds the largest converted parameter (and maps its sources), never the model.

Of a multimodal wrapper only the text part is read: the files' names are the whole wrapper's, the
pack's those of the model that is hosted (`wrapper.py`).

Checks as much as headers tell before the first byte is read: every tensor of the model must be
there with its shape, and nothing may be left over that transformers would drop in silence.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from engine.errors import RegistrationRefused
from engine.registration.blueprint import Blueprint
from engine.registration.tensors import FLOAT_BYTES, Tensors, piece_rows
from kernels.int4_blocks import INT4_BLOCKS, ZEROS, Steps

# Buffers that older releases saved and that are computed today.
_COMPUTED = re.compile(
    r"rotary_emb\.inv_freq$|(?:^|\.)position_ids$|(?:attn|attention)\.masked_bias$"
)


@dataclass(slots=True)
class _Conversion:
    """One run of a converter: its first target as the files' model calls it, and (key, pattern) of
    all it collects."""

    converter: Any
    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Checkpoint:
    """A source's tensors under the model's names.

    direct       model name -> name in the files
    conversions  first target -> what makes it (and perhaps further targets)
    tied         model name -> model name it shares; the latter is in `direct` or converted
    """

    blueprint: Blueprint
    source: Tensors
    direct: dict[str, str]
    conversions: dict[str, _Conversion]
    tied: dict[str, str]

    def names(self) -> list[str]:
        """Names of the tensors a pack must hold, in the module tree's order."""
        return [name for name in self.blueprint.tensors if name not in self.tied]

    def parts(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Each tensor of `names()`, in any order: name, first row, and some of its rows.

        Rows are the first axis; a tensor's parts come in order. Raises RegistrationRefused.
        """
        left = set(self.names())
        for name, key in self.direct.items():
            left.discard(name)
            start = 0
            for piece in self.source.pieces(key):
                yield name, start, piece
                start += len(piece) if piece.dim() else 1
        for target, conversion in self.conversions.items():
            for name, tensor in self._convert(target, conversion).items():
                if name not in left or tensor.shape != self.blueprint.tensors[name].shape:
                    raise RegistrationRefused(
                        "bad_weights",
                        f"the checkpoint's tensor {name} has the shape {tuple(tensor.shape)}, "
                        "which is not the shape in the model; download it again",
                    )
                left.discard(name)
                yield from _rows(name, tensor)
        if left:
            raise _missing(sorted(left))

    def scheme(self, name: str) -> str:
        """The form in which a pack keeps the codes that a weight has already, "" for none."""
        kept = self.source.kept(self.direct[name]) if name in self.direct else None
        return "" if kept is None else kept.scheme

    def steps(self, name: str, scheme: str) -> Steps | None:
        """The steps that a weight was rounded to before, if that form has them."""
        kept = self.source.kept(self.direct[name]) if name in self.direct else None
        if kept is None:
            return None
        if (kept.scheme, scheme) == (INT4_BLOCKS, ZEROS):
            return kept.steps().with_zeros()
        return kept.steps() if kept.scheme == scheme else None

    def _convert(self, target: str, conversion: _Conversion) -> dict[str, torch.Tensor]:
        converter = conversion.converter
        for key, pattern in conversion.sources:
            converter.add_tensor(conversion.target, key, pattern, self.source.read(key))
        model, names = self.blueprint.in_files()
        try:
            made = converter.convert(conversion.target, model=model, config=model.config)
        except Exception as error:  # the library's operations: no contract on their error types
            raise RegistrationRefused(
                "bad_weights",
                f"transformers cannot convert the checkpoint's tensors for {target}: "
                f"{type(error).__name__}: {error}",
            ) from error
        return {
            names.get(name, name): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }


def _rows(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """A tensor in memory, a piece at a time, so that a cast needs no second one of its size."""
    if not tensor.dim():
        yield name, 0, tensor
        return
    row_bytes = tensor[0].numel() * tensor.element_size() if len(tensor) else 1
    step = piece_rows(row_bytes)
    for start in range(0, len(tensor), step):
        yield name, start, tensor[start : start + step]


def open_checkpoint(blueprint: Blueprint, source: Tensors) -> Checkpoint:
    """Map every tensor of the files. Raises RegistrationRefused("bad_weights")."""
    model, names = blueprint.in_files()
    tensors = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    checkpoint = Checkpoint(blueprint, source, {}, {}, {})
    unknown: dict[str, str] = {}
    for key in sorted(source.shapes, key=dot_natural_key):
        found, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if found not in tensors and key in tensors:
            found, pattern = rename_source_key(key, [], [], prefix, tensors)
        name = names.get(found)
        if found not in tensors:
            unknown[key] = found
            continue
        if name is None:
            continue  # a tower's
        source.check(key)
        if pattern is not None:
            conversion = checkpoint.conversions.get(name)
            if conversion is None:
                conversion = _Conversion(copy.deepcopy(by_pattern[pattern]), found)
                checkpoint.conversions[name] = conversion
            conversion.sources.append((key, pattern))
        else:
            checkpoint.direct[name] = key
    for key in [key for key in unknown if source.adds_nothing(key)]:
        del unknown[key]
    _check_unknown(blueprint, source, unknown)
    _settle_ties(checkpoint)
    _check_direct(checkpoint)
    return checkpoint


def _check_unknown(blueprint: Blueprint, source: Tensors, keys: dict[str, str]) -> None:
    """Raises RegistrationRefused where the files hold tensors the model has no place for.

    `keys`: names in the files -> what the library would call them.
    """
    model, _ = blueprint.in_files()
    ignored = [
        re.compile(pattern)
        for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    buffers = {name for name, _ in model.named_buffers()}
    towers = blueprint.wrapper.tower_of(keys.values()) if blueprint.wrapper else set()
    strange = [
        key
        for key, name in keys.items()
        if key not in buffers
        and name not in towers
        and not _COMPUTED.search(key)
        and not _is_mask(source.shapes[key])
        and not any(pattern.search(key) for pattern in ignored)
    ]
    for key in strange:
        source.check(key)
    if strange:
        raise RegistrationRefused(
            "bad_weights",
            f"the checkpoint has {len(strange)} tensors that are not in the model "
            f"({', '.join(strange[:3])}); its config.json does not match this checkpoint: use "
            "another revision of the model",
        )


def _is_mask(shape: tuple[int, ...]) -> bool:
    """Whether it is a causal mask of all positions, which older releases saved (GPT-J)."""
    return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]


def _settle_ties(checkpoint: Checkpoint) -> None:
    """Decide which tensor holds each tied group, as `from_pretrained` does.

    The one that is in the files holds; where several are, those that differ stay apart.
    """
    direct = checkpoint.direct
    groups: dict[str, list[str]] = {}
    for target, origin in checkpoint.blueprint.tied.items():
        groups.setdefault(origin, [origin]).append(target)
    for members in groups.values():
        present = [name for name in members if name in direct or name in checkpoint.conversions]
        if not present:
            continue  # reported as missing
        holder = present[0]
        for name in members:
            if name not in present:
                checkpoint.tied[name] = holder
            elif name != holder and _equal(checkpoint, name, holder):
                checkpoint.tied[name] = holder
                del direct[name]


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    keys = checkpoint.direct.get(one), checkpoint.direct.get(other)
    if keys[0] is None or keys[1] is None:
        return False
    source = checkpoint.source
    kinds = [(source.shapes[key], source.dtypes[key]) for key in (keys[0], keys[1])]
    if kinds[0] != kinds[1]:
        return False
    pieces = (source.pieces(key) for key in (keys[0], keys[1]))
    # A quantized one comes in other pieces than a plain one, and is another one.
    return all(torch.equal(first, second) for first, second in zip(*pieces, strict=False))


def _check_direct(checkpoint: Checkpoint) -> None:
    """Shapes of what is copied as it is, and completeness where nothing is converted."""
    for name, key in checkpoint.direct.items():
        shape = checkpoint.source.shapes[key]
        wanted = tuple(checkpoint.blueprint.tensors[name].shape)
        if shape != wanted:
            raise RegistrationRefused(
                "bad_weights",
                f"tensor {key} has the shape {shape}, but the configuration says {wanted}; "
                "config.json does not match this checkpoint: use another revision of the model",
            )
        if checkpoint.blueprint.tensors[name].is_floating_point():
            _check_float(checkpoint, key)
    _check_conversions(checkpoint)
    missing = [name for name in checkpoint.names() if name not in checkpoint.direct]
    if missing and not checkpoint.conversions:
        raise _missing(missing)


def _check_conversions(checkpoint: Checkpoint) -> None:
    """Types, and that no more is read at once than the whole model has."""
    shapes = checkpoint.source.shapes
    most = sum(tensor.numel() for tensor in checkpoint.blueprint.tensors.values())
    for name, conversion in checkpoint.conversions.items():
        for key, _ in conversion.sources:
            _check_float(checkpoint, key)
        if sum(torch.Size(shapes[key]).numel() for key, _ in conversion.sources) > most:
            raise RegistrationRefused(
                "bad_weights",
                f"the checkpoint's tensors for {name} have more values than the whole model; "
                "config.json does not match this checkpoint: use another revision of the model",
            )


def _check_float(checkpoint: Checkpoint, key: str) -> None:
    """Integers for weights are rounded ones, whose scales we do not know: they are no weights."""
    dtype = checkpoint.source.dtypes[key]
    if dtype not in FLOAT_BYTES:
        raise RegistrationRefused(
            "quantized_weights",
            f"tensor {key} has the unsupported type {dtype}; register the unquantized checkpoint",
        )


def _missing(names: list[str]) -> RegistrationRefused:
    return RegistrationRefused(
        "bad_weights",
        f"{len(names)} tensors of the model are missing from the checkpoint "
        f"({', '.join(names[:3])}); download it again",
    )
