"""A causal LM's body and head apart: the hidden states between them, and logits of some of them.

Logprobs of a prompt need logits at every position, and those of a step's thousand positions at once
are hundreds of megabytes. What is behind the body differs (soft caps, scales), so it is the model's
own code that turns hidden states into logits here too: the body's `forward` is exchanged for one
that gives it what was kept. Used in the thread of the steps only.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


class KeptStates:
    """What the body of `model` put out in one pass."""

    def __init__(self, model: nn.Module, body: nn.Module) -> None:
        self._model = model
        self._body = body
        self._output: Any = None

    def keep(self, module: nn.Module, inputs: Any, output: ModelOutput) -> None:
        """A forward hook."""
        del module, inputs
        self._output = output

    @property
    def hidden(self) -> torch.Tensor:
        """[T, H], after the body's last norm."""
        states: torch.Tensor = self._output.last_hidden_state[0]
        return states

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Some of them [n, H] to logits [n, V]."""
        given = dataclasses.replace(self._output, last_hidden_state=hidden[None])
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        self._body.forward = lambda *args, **kwargs: given
        try:
            output = self._model(input_ids=nothing, use_cache=False, logits_to_keep=0)
        finally:
            del self._body.forward  # the class's own shows again
        logits: torch.Tensor = output.logits[0]
        return logits


class ModelBody:
    """The part of one skeleton that ends with the last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, PreTrainedModel)
        self._model = model
        # Models made after an encoder and a decoder call the decoder directly (OPT).
        decoder = getattr(model.base_model, "decoder", None)
        self._body: nn.Module = decoder if isinstance(decoder, nn.Module) else model.base_model

    @contextmanager
    def keeping(self) -> Iterator[KeptStates]:
        """Keeps the hidden states of the forward pass inside."""
        kept = KeptStates(self._model, self._body)
        handle = self._body.register_forward_hook(kept.keep)
        try:
            yield kept
        finally:
            handle.remove()
