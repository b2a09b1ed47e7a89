"""Which models run as fused layers instead of their modules, and how: recognition and forward pass.

A model whose decoder layers have the llama-like structure runs as nine calls a layer
(kernels/decoder_layer.py) over the same weights: query, key and value projections as one product,
gate and up as another, norms with the residual added on the way, rotary with the KV write. Weights
are views of the arena; nothing is copied.

    recognise(model, index) -> Fused      or why not, in words; then the modules run as they are
    Fused.bind(tensors)     -> the weights of every layer, at their addresses of now
    Fused.forward           -> hidden states, from token ids

Recognition goes by the class of the layers (what a forward does cannot be seen from outside), and
by everything that can: children, norms, activation, multipliers, ties of shapes. A pack that does
not keep the projections side by side is not fused. Every class named here is held to its modules by
tests/engine/running/test_fusion.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.modules.experts import is_experts
from engine.modules.quantized import RowsLinear
from engine.pack import SCALE_SUFFIX, FusedGroup, PackIndex, schemes_in
from kernels.decoder_layer import (
    LayerForm,
    LayerStep,
    LayerWeights,
    Operations,
    Product,
    decoder_layer,
)
from kernels.gate_mul import Activation

LAYERS = frozenset(
    {
        "LlamaDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "MistralDecoderLayer",
        "Phi3DecoderLayer",
        "GraniteDecoderLayer",
        "OlmoDecoderLayer",
        "GemmaDecoderLayer",
        "SmolLM3DecoderLayer",
    }
)
# The same layers with experts in place of gate, up and down, or in place of some layers': their MLP
# stays a module. On a device only where its kernels know the experts (engine/modules/experts.py):
# anything else makes the step wait for the choice.
EXPERT_LAYERS = frozenset({"Qwen2MoeDecoderLayer", "Qwen3MoeDecoderLayer", "MixtralDecoderLayer"})
CENTERED = frozenset({"OlmoLayerNorm"})
UNIT_OFFSET = frozenset({"GemmaRMSNorm"})
OLMO_EPS = 1e-5
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
CHILDREN = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
DROPOUTS = frozenset({"resid_attn_dropout", "resid_mlp_dropout"})
BODY = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})

StepOf = Callable[[int, torch.Tensor | None, torch.Tensor | None], LayerStep]
"""(layer, cos, sin) -> where the step's tokens are in that layer's cache."""


class NotFused(ValueError):
    """Why a model runs by its modules."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the layers leave: the stream, and the last branch that has not been added to it."""

    branch: torch.Tensor
    stream: torch.Tensor


def form_of(layer: nn.Module, config: Any) -> LayerForm:
    """What kind of layer it is, by its modules and its configuration. Raises NotFused."""
    norm = type(layer.get_submodule("input_layernorm")).__name__
    attention = layer.get_submodule("self_attn")
    scale, head_dim = getattr(attention, "scaling", None), getattr(attention, "head_dim", None)
    if not isinstance(scale, float) or not isinstance(head_dim, int):
        raise NotFused("attention without a scale or a head's size")
    if config.hidden_act not in ACTIVATIONS:
        raise NotFused(f"activation {config.hidden_act}")
    return LayerForm(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=OLMO_EPS if norm in CENTERED else config.rms_norm_eps,
        scale=scale,
        activation=ACTIVATIONS[config.hidden_act],
        residual_multiplier=getattr(config, "residual_multiplier", 1.0),
        unit_offset=norm in UNIT_OFFSET,
        center=norm in CENTERED,
    )


def check_layer(layer: nn.Module, config: Any, experts: bool = False) -> None:
    """Raises NotFused unless the layer is one of those above, with nothing more in it."""
    name = type(layer).__name__
    if name not in LAYERS and not (experts and name in EXPERT_LAYERS):
        raise NotFused(f"layers are {name}")
    children = {child for child, _ in layer.named_children()} - DROPOUTS
    if children != CHILDREN:
        raise NotFused(f"a layer has {sorted(children)}")
    if getattr(config, "clip_qkv", None) is not None:
        raise NotFused("queries, keys and values are clipped")


def has_experts(part: nn.Module) -> bool:
    """Whether some of what is in an MLP, or in a model, is stacked experts."""
    return any(is_experts(module) for module in part.modules())


def is_head(head: object) -> bool:
    """Whether logits are one product of the states."""
    return isinstance(head, (nn.Linear, RowsLinear))


class Fused:
    """One model's forward pass over fused layers. `bind` before every use of other weights."""

    def __init__(self, model: nn.Module, index: PackIndex, experts: bool = False) -> None:
        """`experts`: layers that have some are fused, too. Raises NotFused."""
        config: Any = model.config
        body = getattr(model, "model", None)
        children = set() if body is None else {name for name, _ in body.named_children()}
        if body is None or children != BODY or not is_head(model.lm_head):
            raise NotFused(f"the body has {sorted(children)}")
        factor = getattr(body.embed_tokens, "embed_scale", None)
        if config.model_type == "gemma" and factor is None:
            raise NotFused("embeddings are scaled in the forward pass")
        layers = body.layers
        for layer in layers:
            check_layer(layer, config, experts)
        if any(group.readers for group in index.kv_groups):
            raise NotFused("layers read the KV of others")
        if any(group.chunk for group in index.kv_groups):
            raise NotFused("layers attend in chunks")
        self._model: Any = model
        self._body: Any = body
        self._forms = [form_of(layer, config) for layer in layers]
        self._experts = [
            layer.mlp if type(layer).__name__ in EXPERT_LAYERS and has_experts(layer.mlp) else None
            for layer in layers
        ]
        self._rotates = [bool(getattr(layer.self_attn, "use_rope", True)) for layer in layers]
        self._groups: Mapping[str, FusedGroup] = {group.name: group for group in index.fused}
        self._names = frozenset(entry.name for entry in index.tensors) | set(index.tied)
        self._schemes = schemes_in(index)
        self._embedding_multiplier = float(getattr(config, "embedding_multiplier", 1.0))
        self._logits_scaling = float(getattr(config, "logits_scaling", 1.0))
        self._norm = self._forms[0]
        self._weights: list[LayerWeights] = []
        for number, _ in enumerate(layers):
            self._check_names(number)

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """Use these views. Returns the addresses of all weights: what a graph is good for."""
        self._weights = [self._layer(tensors, i) for i in range(len(self._forms))]
        return tuple(tensors[name].data_ptr() for name in sorted(self._names))

    def unbind(self) -> None:
        """Forget the weights."""
        self._weights = []

    @property
    def forms(self) -> Sequence[LayerForm]:
        """Of every layer."""
        return self._forms

    @property
    def rotates(self) -> Sequence[bool]:
        """Of every layer: are queries and keys rotated there."""
        return self._rotates

    @property
    def weights(self) -> Sequence[LayerWeights]:
        """Of every layer; empty while unbound."""
        return self._weights

    @property
    def last_norm(self) -> torch.Tensor | None:
        """The weight of the norm before the head."""
        weight: torch.Tensor | None = getattr(self._body.norm, "weight", None)
        return weight

    @property
    def size(self) -> int:
        """Of hidden states."""
        size: int = self._model.config.hidden_size
        return size

    @property
    def output_head(self) -> tuple[Product, float]:
        """The head, and what its logits are divided by."""
        head: Any = self._model.lm_head
        scale: torch.Tensor | None = getattr(head, "weight_scale", None)
        return Product(head.weight, head.bias, scale), self._logits_scaling

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, positions [T] to x [T, H] and the angles' cos, sin [T, half]."""
        x = self._body.embed_tokens(ids)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        cos, sin = self._body.rotary_emb(x[None], positions[None])
        half = cos.shape[-1] // 2
        return x, cos[0, :, :half], sin[0, :, :half]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, step_of: StepOf, operations: Operations
    ) -> Hidden:
        """ids, positions [T]; K and V of all of them are written."""
        x, cos, sin = self.embed(ids, positions)
        stream: torch.Tensor | None = None
        for i, (weights, form) in enumerate(zip(self._weights, self._forms, strict=True)):
            step = step_of(i, cos, sin) if self._rotates[i] else step_of(i, None, None)
            x, stream = decoder_layer(x, stream, weights, form, step, operations)
        assert stream is not None
        return Hidden(x, stream)

    def normed(
        self, hidden: Hidden, index: torch.Tensor | None, operations: Operations
    ) -> torch.Tensor:
        """The states that the head is given: of all tokens, or of those in `index`."""
        branch, stream = hidden.branch, hidden.stream
        if index is not None:
            branch, stream = branch.index_select(0, index), stream.index_select(0, index)
        form = self._norm
        y, _ = operations.norm(
            branch,
            self.last_norm,
            form.eps,
            stream,
            multiplier=form.residual_multiplier,
            unit_offset=form.unit_offset,
            center=form.center,
        )
        return y

    def head(self, states: torch.Tensor, operations: Operations) -> torch.Tensor:
        """[n, H] to logits [n, V], in the model's dtype."""
        logits = operations.product(states, self.output_head[0])
        return logits if self._logits_scaling == 1.0 else logits / self._logits_scaling

    def _check_names(self, number: int) -> None:
        for child, label, leaves in PROJECTIONS:
            prefix = f"model.layers.{number}.{child}"
            if f"{prefix}.{label}.weight" in self._names:
                continue
            for kind in ("weight", "bias", f"weight{SCALE_SUFFIX}"):
                some = any(f"{prefix}.{leaf}.{kind}" in self._names for leaf in leaves)
                if some and f"{prefix}.{label}.{kind}" not in self._groups:
                    raise NotFused(f"the pack keeps {prefix}.{leaves[0]}.{kind} by itself")

    def _layer(self, tensors: Mapping[str, torch.Tensor], number: int) -> LayerWeights:
        prefix = f"model.layers.{number}"
        experts = self._experts[number]
        qkv, gate_up = (
            self._product(tensors, f"{prefix}.{child}", label, leaves)
            if experts is None or child != "mlp"
            else NO_PRODUCT
            for child, label, leaves in PROJECTIONS
        )
        down = f"{prefix}.mlp.down_proj"
        return LayerWeights(
            input_norm=tensors.get(f"{prefix}.input_layernorm.weight"),
            qkv=qkv,
            out=self._single(tensors, f"{prefix}.self_attn.o_proj"),
            post_norm=tensors.get(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=gate_up,
            down=self._single(tensors, down) if experts is None else NO_PRODUCT,
            mlp=experts,
            q_norm=tensors.get(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=tensors.get(f"{prefix}.self_attn.k_norm.weight"),
        )

    def _product(
        self, tensors: Mapping[str, torch.Tensor], prefix: str, label: str, leaves: tuple[str, ...]
    ) -> Product:
        if f"{prefix}.{label}.weight" in tensors:
            return self._single(tensors, f"{prefix}.{label}")

        def joined(kind: str) -> torch.Tensor | None:
            group = self._groups.get(f"{prefix}.{label}.{kind}")
            return None if group is None else join_view(tensors, group)

        weight = joined("weight")
        assert weight is not None
        scheme = self._schemes.get(f"{prefix}.{leaves[0]}.weight", "")
        return Product(weight, joined("bias"), joined(f"weight{SCALE_SUFFIX}"), scheme)

    def _single(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> Product:
        return Product(
            tensors[f"{prefix}.weight"],
            tensors.get(f"{prefix}.bias"),
            tensors.get(f"{prefix}.weight{SCALE_SUFFIX}"),
            self._schemes.get(f"{prefix}.weight", ""),
        )


NO_PRODUCT = Product(torch.empty(0))
PROJECTIONS = (
    ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
)


def recognise(
    model: nn.Module, index: PackIndex, experts: bool = False
) -> tuple[Fused | None, str]:
    """The fused form of a model, or None and why it has none. `experts`: see Fused."""
    try:
        return Fused(model, index, experts), ""
    except NotFused as why:
        return None, str(why)


def join_view(tensors: Mapping[str, torch.Tensor], group: FusedGroup) -> torch.Tensor:
    """The members of a group, which lie behind one another in the arena, as one tensor."""
    members = [tensors[name] for name in group.members]
    first = members[0]
    rows = sum(member.shape[0] for member in members)
    shape = (rows, *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
