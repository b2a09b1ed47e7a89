"""Where a module of the library does not do in our batches what it does alone.

What is repaired is found by structure and options; a skeleton that computes by the library's own
attention is left as it is, because the parity probe compares ours with it.

    tables a layer   embeddings of which each layer takes a part (Gemma 3n) may have fewer rows than
                     the vocabulary: ids of images and sound have none. The wrapper gives them the
                     row of id 0, the text class fails; on a device that ends the process.
"""

from typing import Any

import torch
from torch import nn


def repair(model: nn.Module, text: Any) -> None:
    """Change what has to be changed. `text`: the configuration of its text part."""
    rows = getattr(text, "vocab_size_per_layer_input", None)
    if isinstance(rows, int) and 0 < rows < text.vocab_size:
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == rows:
                module.register_forward_pre_hook(_known_ids)


def _known_ids(module: Any, inputs: tuple[Any, ...]) -> tuple[torch.Tensor]:
    """A forward pre-hook."""
    ids: torch.Tensor = inputs[0]
    return (torch.where(ids < module.num_embeddings, ids, 0),)
