"""How a transformers causal LM becomes ours: skeletons without weights, attention over pages.

One function is registered with transformers' attention interface and no mask function, so that the
library builds no mask. During a step, what the function needs (arena, tables) is in a context
variable and not in forward's arguments, which some families drop.

A skeleton is the module tree with parameters on `meta` and computed buffers (rotary frequencies)
real. It is built once per model and kept for ever; a swap only points parameters at new views.

A causal model's body and head are taken apart for logprobs of a prompt (`KeptStates`): they need
logits at every position, and those of a step's thousand positions at once are hundreds of
megabytes. What is behind the body differs (soft caps, scales), so it is the model's own code that
turns hidden states into logits here too: the body's `forward` is exchanged for one that gives it
what was kept.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from engine.errors import IntegrityError
from engine.memory import KvPlan
from engine.modules.experts import EXPERTS_NAME, register_experts
from engine.modules.flat_mixers import run_mixers
from engine.modules.indexers import Pages, attend_sparse, run_indexers
from engine.modules.latent import absorb, attend_latents, is_latent, keep_latents, project
from engine.modules.own_attention import install, takes_interface
from engine.modules.repairs import repair
from engine.modules.scored_experts import replace_blocks
from engine.modules.state_mixers import StepStates
from engine.modules.text_part import from_config, parameters_on_meta
from kernels.decoder_layer import LayerForm, LayerStep, Operations
from kernels.paged_attention import PagedBatch, paged_attention_ref, write_kv_ref
from kernels.sparse_attention import Chosen

ATTENTION_NAME = "polyhost_paged"


Attended: TypeAlias = Callable[
    [int, torch.Tensor, float, float, torch.Tensor | None], tuple[LayerForm, LayerStep]
]
"""(layer, query [T, heads, dim], scale, softcap, sinks) -> how and over what it attends."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What attention and mixers need to know of the step that is running; `groups` by layer group.

    states       what its rows keep beside KV
    attended     on a device: the step's rows as its operations take them, in place of `groups`
    operations   those that write K and V and attend there
    """

    arena: torch.Tensor
    plan: KvPlan
    groups: tuple[PagedBatch, ...]
    states: StepStates | None = None
    attended: Attended | None = None
    operations: Operations | None = None


_STEP: ContextVar[StepContext] = ContextVar("polyhost_step")


@contextlib.contextmanager
def step_context(context: StepContext) -> Iterator[None]:
    """Forward passes inside attend over `context`."""
    token = _STEP.set(context)
    try:
        yield
    finally:
        _STEP.reset(token)


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    indices: Chosen | None = None,
    block_indices: Chosen | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, T, dim] after RoPE -> [1, T, heads, dim].

    `indices` or `block_indices`: what an indexer has chosen (indexers.py).

    A layer that reads the KV of an earlier one is given that one's keys and values of this step,
    which are in their pages already.

    Sliding windows come from the pack's geometry, not from `kwargs`: it was read from the same
    configuration and also decides what is kept.
    """
    step = _STEP.get()
    layer = module.layer_idx
    assert isinstance(layer, int)
    writes = step.plan.writes(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if step.attended is not None and step.operations is not None:
        assert slopes is None, "kernels know no slopes: such models are not loaded"
        assert (indices or block_indices) is None, "kernels attend to whole contexts"
        own = absorb(module, query[0]) if is_latent(module) else query[0]
        flat = [tensor.transpose(0, 1) for tensor in (own, key[0], value[0])]
        form, where = step.attended(layer, flat[0], scale, softcap or 0.0, s_aux)
        if writes:
            flat[0] = step.operations.write(*flat, form, where)
        out = step.operations.attend(flat[0], form, where)
        if is_latent(module):
            out = project(module, out.transpose(0, 1)).transpose(0, 1)
        return out[None], None
    group, place = step.plan.layer_group[layer]
    batch, geometry = step.groups[group], step.plan.groups[group].block
    table = batch.table[place]
    if writes:
        write_kv_ref(
            step.arena, geometry, table, batch, key[0].transpose(0, 1), value[0].transpose(0, 1)
        )
    where_kv = (step.arena, geometry, table, batch, query[0], scale, softcap or 0.0, s_aux)
    chosen = indices or block_indices
    if chosen is not None:
        out = attend_sparse(module, *where_kv, chosen)
    elif is_latent(module):
        out = attend_latents(module, *where_kv)
    else:
        out = paged_attention_ref(*where_kv, slopes)
    return out[None], None


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)


def build_skeleton(
    source: Path | Any, dtype: torch.dtype, attention: str = ATTENTION_NAME
) -> nn.Module:
    """The module tree of a pack folder (or of a ready configuration object), without weights.

    `attention`: the name of what its layers attend with; the parity probe has others. With "eager"
    all of the model is the library's own, experts too.
    """
    register_attention()
    register_experts()
    config = AutoConfig.from_pretrained(str(source)) if isinstance(source, Path) else source
    is_own = not takes_interface(config.get_text_config())
    options: dict[str, Any] = {
        "attn_implementation": "eager" if is_own else attention,
        "dtype": dtype,
    }
    if attention != "eager":
        options["experts_implementation"] = EXPERTS_NAME
    with parameters_on_meta():
        model = from_config(config, **options)
    if attention != "eager":
        repair(model, config.get_text_config())
        replace_blocks(model)
        keep_latents(model)
        run_mixers(model, _step_states)
        run_indexers(model, _step_pages)
        if is_own:
            install(model, attention)
    return model.eval()


def _step_states() -> StepStates:
    states = _STEP.get().states
    assert states is not None, "a step without states"
    return states


def _step_pages() -> Pages:
    step = _STEP.get()
    return Pages(step.arena, step.plan, step.groups)


def buffers_to(model: nn.Module, device: torch.device) -> None:
    """What was computed (rotary frequencies) to where the steps run."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def bind_weights(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Point every parameter and persistent buffer at its view. Raises KeyError for a missing one.

    Tied names are in `tensors` under each of their names.
    """
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                view = tensors[dot + name]
                module._parameters[name] = nn.Parameter(view, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = tensors[dot + name]


def unbind_weights(model: nn.Module) -> None:
    """Back to meta, so that nothing can read memory that has been given back."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)


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

    def take(self) -> torch.Tensor:
        """`hidden`, which is not kept any longer: it may lie in a recording's memory."""
        states = self.hidden
        self._output = dataclasses.replace(self._output, last_hidden_state=None)
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


class _BodyEnded(Exception):
    """Leaves a model's forward pass before its head."""


class ModelBody:
    """The part of one skeleton that ends with the last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, PreTrainedModel)
        self._model = model
        # Models made after an encoder and a decoder call the decoder directly (OPT).
        decoder = getattr(model.base_model, "decoder", None)
        self._body: nn.Module = decoder if isinstance(decoder, nn.Module) else model.base_model
        if self._body is model:  # its body has another name than it says (Llama 4)
            (self._body,) = (part for part in model.children() if isinstance(part, PreTrainedModel))
        self._kept = KeptStates(model, self._body)

    def states(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """The body alone: [1, T] to [T, H], after its last norm."""

        def leave(module: nn.Module, inputs: Any, output: ModelOutput) -> None:
            self._kept.keep(module, inputs, output)
            raise _BodyEnded

        handle = self._body.register_forward_hook(leave)
        try:
            self._model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        except _BodyEnded:
            return self._kept.take()
        finally:
            handle.remove()
        raise IntegrityError("a model has run without its body")

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """[n, H] to logits [n, V]; of states that `states` has put out, in any pass."""
        return self._kept.project(states)

    @contextmanager
    def keeping(self) -> Iterator[KeptStates]:
        """Keeps the hidden states of the forward pass inside."""
        kept = KeptStates(self._model, self._body)
        handle = self._body.register_forward_hook(kept.keep)
        try:
            yield kept
        finally:
            handle.remove()
