"""Where a module of the library does not do in our batches what it does alone.

What is repaired is found by structure and options; a skeleton that computes by the library's own
attention is left as it is, because the parity probe compares ours with it.

    tables a layer   embeddings of which each layer takes a part (Gemma 3n) may have fewer rows than
                     the vocabulary: ids of images and sound have none. The wrapper gives them the
                     row of id 0, the text class fails; on a device that ends the process.
    positions        attention that derives positions from the length of the cache (Llama 4, whose
                     queries without rotary are scaled by them) takes all rows for one sequence. It
                     is given the difference between each token's position and its place in the
                     batch as that length.
"""

import inspect
from typing import Any

import torch
from torch import nn

LENGTH = "get_seq_length"


def repair(model: nn.Module, text: Any) -> None:
    """Change what has to be changed. `text`: the configuration of its text part."""
    rows = getattr(text, "vocab_size_per_layer_input", None)
    if isinstance(rows, int) and 0 < rows < text.vocab_size:
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == rows:
                module.register_forward_pre_hook(_known_ids)
    for module in model.modules():
        if any(_asks_length(child) for child in module.children()):
            module.register_forward_pre_hook(_give_offsets, with_kwargs=True)


class Offsets:
    """A cache object for attention that only wants to know how many tokens came before."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        """position_ids [1, T]."""
        positions = position_ids[0]
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """int64 [T]."""
        return self._offsets

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept is in pages."""
        return key, value


def _asks_length(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return hasattr(module, "layer_idx") and code is not None and LENGTH in code.co_names


def _give_offsets(
    module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of a decoder layer."""
    positions = named.get("position_ids")
    if positions is None or named.get("past_key_values") is not None:
        return inputs, named
    return inputs, named | {"past_key_values": Offsets(positions)}


def _known_ids(module: Any, inputs: tuple[Any, ...]) -> tuple[torch.Tensor]:
    """A forward pre-hook."""
    ids: torch.Tensor = inputs[0]
    return (torch.where(ids < module.num_embeddings, ids, 0),)
