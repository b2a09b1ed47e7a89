"""The text part of a model: the model itself, or what a multimodal wrapper generates text with.

A wrapper's configuration has one text configuration beside those of its towers (images, sound). Its
text part is two modules: the body, which is its innermost decoder, and the head that makes logits.
A wrapper whose text part runs without the others is hosted as it is, flat: its towers keep their
modules, but no tensors (`drop_towers`), so none are bound or kept in memory, and what they say is
NaN: a pass may ask them about tokens that are not there, and one that used their answer would show.
A tower whose library is not installed here (timm) is not built. Nothing here knows the name of a
family's class or of a module.

Does not know which wrappers come out right: that is registration's (`registration/wrapper.py`).
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from engine.modules.scored_experts import mark_experts


class AbsentTowerConfig(PretrainedConfig):  # type: ignore[misc]
    """What a tower's configuration says, for one that cannot be built here."""

    model_type = "polyhost_absent_tower"


class AbsentTower(PreTrainedModel):  # type: ignore[misc]
    """Stands where a wrapper has that tower: nothing is in it."""

    config_class = AbsentTowerConfig


def is_wrapper(config: Any) -> bool:
    """Whether text is one part of several. Raises ValueError where it has several texts."""
    return config.get_text_config() is not config


def from_config(config: Any, whole: bool = False, **options: Any) -> nn.Module:
    """The module tree of a configuration: a causal LM, or a wrapper.

    `whole`: a wrapper keeps its towers' tensors.
    """
    wrapped = is_wrapper(config)
    kind = AutoModelForMultimodalLM if wrapped else AutoModelForCausalLM
    try:
        model = kind.from_config(config, **options)
    except ImportError:
        if not wrapped:
            raise
        model = kind.from_config(_without_absent_towers(config), **options)
    assert isinstance(model, nn.Module)
    mark_experts(model)
    if wrapped and not whole:
        drop_towers(model)
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside get meta parameters and real buffers.

    Replaces a method of torch.nn.Module for the moment: only the step thread builds skeletons. And
    one of transformers: parameters on meta have no values to draw, but it would draw them, one by
    one, as long as the rest takes.
    """
    original = nn.Module.register_parameter
    initialize = PreTrainedModel.initialize_weights

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            meta = nn.Parameter(param.to("meta"), requires_grad=False)
            self._parameters[name] = meta

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    PreTrainedModel.initialize_weights = lambda self: None
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        PreTrainedModel.initialize_weights = initialize


def body_of(model: Any) -> nn.Module:
    """The innermost decoder: its states are what the head is given."""
    body = model.get_decoder()
    while isinstance(body, PreTrainedModel):
        inner = body.get_decoder()
        if inner is body or not isinstance(inner, nn.Module):
            break
        body = inner
    assert isinstance(body, nn.Module)
    return body


def head_of(model: Any) -> nn.Module | None:
    """What makes logits, where it is a module of its own."""
    head, within = model.get_output_embeddings(), model
    while head is None and within.get_decoder() is not within:
        within = within.get_decoder()
        if not isinstance(within, PreTrainedModel):
            break
        head = within.get_output_embeddings()
    assert head is None or isinstance(head, nn.Module)
    return head


def drop_towers(model: nn.Module) -> None:
    """Take the tensors off everything but the body and the head."""
    parts = (body_of(model), head_of(model))
    kept = {id(module) for part in parts if part is not None for module in part.modules()}
    above = [
        module
        for module in model.modules()
        if id(module) not in kept and any(id(inner) in kept for inner in module.modules())
    ]
    for module in above:
        module._parameters.clear()
        module._buffers.clear()
        for child in module.children():
            if id(child) not in kept and child not in above:
                child._modules.clear()
                child._parameters.clear()
                child._buffers.clear()
                child.forward = _say_nothing


def _say_nothing(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(math.nan)


def _without_absent_towers(config: Any) -> Any:
    """A copy of a wrapper's configuration whose towers can all be built."""
    AutoModel.register(AbsentTowerConfig, AbsentTower, exist_ok=True)
    changed, text = copy.deepcopy(config), config.get_text_config()
    for name, part in vars(config).items():
        if isinstance(part, PretrainedConfig) and part is not text:
            try:
                with torch.device("meta"):
                    AutoModel.from_config(part)
            except ImportError:
                said = part.to_dict()
                said.pop("model_type", None)
                # Some configurations look at the types of what is set.
                vars(changed)[name] = AbsentTowerConfig(**said)
            except ValueError:
                continue  # no model of its own
    return changed
