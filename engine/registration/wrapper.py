"""Multimodal wrappers as text models: what of them is judged, which names, which tensors count.

A wrapper is hosted in one of two ways, by structure and not by its name:

    as its text class  the text configuration has a causal class of its own, and that class with the
                       wrapper's text weights says what the wrapper says (`parity.py` compares): the
                       pack is that class's, and fused and native layers apply
    flat               the wrapper itself, its towers without tensors (`modules/text_part.py`)

Names in the files are those of the whole wrapper, with all prefixes that were ever published, so
the library's conversions run over the whole wrapper; `Wrapped.names` says what its text part is
called in the pack. Everything else is the towers': it is never read.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from engine.errors import RegistrationRefused
from engine.modules.text_part import body_of, head_of

TEXT_SECTIONS = ("text_config", "decoder", "generator")
"""Where `get_text_config` looks."""
MAX_LAYERS = 1024
"""Each is built as modules before any weights are there: a number too many would never end."""
_LAYER_COUNTS = re.compile(r"(?:^|_)(?:layer|depth|block)s?$")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The wrapper around a hosted text model.

    config    the wrapper's
    skeleton  the whole wrapper on meta, towers and all
    names     of its text part's tensors -> their names in the pack
    """

    config: Any
    skeleton: nn.Module
    names: Mapping[str, str]

    def tower_of(self, names: Iterable[str]) -> set[str]:
        """Those of `names` that lie in a module of the wrapper with nothing of the text part."""
        text = {prefix for known in self.names for prefix in _prefixes(known)}
        towers = {path for path, _ in self.skeleton.named_modules()} - text - {""}
        return {name for name in names if not towers.isdisjoint(_prefixes(name))}


def text_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a config.json that has one, else {}."""
    found = (raw.get(name) for name in TEXT_SECTIONS)
    return next((value for value in found if isinstance(value, dict)), {})


def check_section(path: Path, raw: Mapping[str, Any]) -> None:
    """Raises RegistrationRefused for several text parts, or one that is no object."""
    sections = [name for name in TEXT_SECTIONS if raw.get(name) is not None]
    if len(sections) > 1:
        raise RegistrationRefused(
            "bad_config", f"{path} has several text parts ({', '.join(sections)}); one is supported"
        )
    for name in sections:
        if not isinstance(raw[name], dict):
            raise RegistrationRefused(
                "bad_config", f"{name} in {path} is not an object; download the model again"
            )


def check_wrapper(path: Path, raw: Mapping[str, Any], config: Any) -> None:
    """Raises RegistrationRefused unless the file says what the wrapper's text part is."""
    text = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise RegistrationRefused(
            "bad_config", f"{path} has a text part that is no configuration of a model"
        )
    if not _places(config):
        raise RegistrationRefused(
            "unknown_family",
            f"model type {config.model_type!r} is not supported: its text part is not one section "
            "of its configuration",
        )
    if not text_section(raw) and _says_nothing(config, text):
        raise RegistrationRefused(
            "bad_config", f"{path} has no {TEXT_SECTIONS[0]}; download the model again"
        )


def check_layers(path: Path, config: Any) -> None:
    """Raises RegistrationRefused for more layers than are built, in any part."""
    for name, count in _layer_counts(config):
        if count > MAX_LAYERS:
            raise RegistrationRefused(
                "bad_config", f"{path} has {count} layers ({name}); the maximum is {MAX_LAYERS}"
            )


def _says_nothing(config: Any, text: Any) -> bool:
    """Whether the text part is the type's default: older files name its fields beside the rest."""
    try:
        default = type(config)().get_text_config()
    except Exception:  # noqa: BLE001 - configurations without defaults raise what they like
        return False
    return bool(default.to_dict() == text.to_dict())


def _layer_counts(config: Any) -> Iterator[tuple[str, int]]:
    """Numbers of layers in the model and in each part of it."""
    yield "num_hidden_layers", _largest(getattr(config, "num_hidden_layers", None))
    for part, inner in vars(config).items():
        if isinstance(inner, PretrainedConfig):
            yield from ((f"{part}.{name}", count) for name, count in _layer_counts(inner))
            for name, value in vars(inner).items():
                if _LAYER_COUNTS.search(name):
                    yield f"{part}.{name}", _largest(value)


def _largest(value: Any) -> int:
    """The number, or of a list the largest and how many there are; 0: none."""
    if isinstance(value, list | tuple):
        return max((len(value), *(n for n in value if isinstance(n, int))))
    return value if isinstance(value, int) else 0


def set_text_config(config: Any, text: Any) -> Any:
    """A copy of a wrapper's configuration around another text configuration."""
    changed = copy.deepcopy(config)
    for name in _places(config):
        setattr(changed, name, text)
    return changed


def _places(config: Any) -> list[str]:
    text = config.get_text_config()
    return [name for name in TEXT_SECTIONS if getattr(config, name, None) is text]


def class_config(wrapper: Any) -> Any | None:
    """The configuration of a wrapper's text part alone, None where it has no class of its own.

    As a pack's file gives it. `wrapper`: its modules. Whether head and embedding share their weight
    is the wrapper's decision, and so are the ids that begin and end a text where it names them.
    """
    outer = wrapper.config
    if type(outer.get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    text = copy.deepcopy(outer.get_text_config())
    head, embedding = head_of(wrapper), body_of(wrapper).get_input_embeddings()  # type: ignore[operator]
    if head is None or not hasattr(head, "weight"):
        return None
    text.tie_word_embeddings = head.weight is embedding.weight
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]
    for name in _SPECIAL_IDS:
        if getattr(outer, name, None) is not None:
            setattr(text, name, getattr(outer, name))
    return type(text).from_dict(json.loads(text.to_json_string(use_diff=False)))


def text_names(wrapper: nn.Module, hosted: nn.Module) -> dict[str, str] | None:
    """Names of the wrapper's text tensors -> their names in `hosted`; None: they do not match."""
    moves = list(_moves(wrapper, hosted))
    found: dict[str, str] = {}
    shapes = {name: tensor.shape for name, tensor in hosted.state_dict().items()}
    for name, tensor in wrapper.state_dict().items():
        for old, new in moves:
            if name.startswith(old):
                other = new + name.removeprefix(old)
                if shapes.get(other) != tensor.shape:
                    return None
                found[name] = other
                break
    return found if set(found.values()) == set(shapes) else None


def _moves(wrapper: nn.Module, hosted: nn.Module) -> Iterator[tuple[str, str]]:
    """Prefixes of the two parts in the one and in the other."""
    places = [{id(m): path for path, m in model.named_modules()} for model in (wrapper, hosted)]
    for part in (body_of, head_of):
        modules = part(wrapper), part(hosted)
        if modules[0] is not None and modules[1] is not None:
            old, new = (place[id(m)] for place, m in zip(places, modules, strict=True))
            yield (f"{old}." if old else ""), (f"{new}." if new else "")


def _prefixes(name: str) -> list[str]:
    """Of a dotted name, itself last."""
    return list(accumulate(name.split("."), "{}.{}".format))
