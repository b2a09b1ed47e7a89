"""A transformers decoder layer as kernels/decoder_layer.py takes it: fused weights and its form.

Reads modules by the names that llama and its kin share; a family with other names or norms after
its branches raises ValueError.
"""

import torch
from torch import nn

from engine.running.fusion import form_of
from kernels.decoder_layer import LayerWeights, Product

__all__ = ["form_of", "fused", "weights_of"]


def fused(*linears: nn.Linear) -> Product:
    """The rows of several linears over the same input, as one product."""
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        raise ValueError("some of the products to fuse have a bias and some none")
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if biases[0] is None:
        return Product(weight)
    return Product(weight, torch.cat([bias.detach() for bias in biases]))


def weights_of(layer: nn.Module) -> LayerWeights:
    """Of one decoder layer. Raises ValueError where it is of another kind."""
    children = {name for name, _ in layer.named_children()}
    if children != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"} | (
        children & {"resid_attn_dropout", "resid_mlp_dropout"}
    ):
        raise ValueError(f"not a llama-like layer: {sorted(children)}")
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    qkv, gate_up = ["qkv_proj"], ["gate_up_proj"]
    if not hasattr(attention, "qkv_proj"):
        qkv = ["q_proj", "k_proj", "v_proj"]
    if not hasattr(mlp, "gate_up_proj"):
        gate_up = ["gate_proj", "up_proj"]
    return LayerWeights(
        input_norm=_weight(layer.get_submodule("input_layernorm")),
        qkv=fused(*(_linear(attention, name) for name in qkv)),
        out=fused(_linear(attention, "o_proj")),
        post_norm=_weight(layer.get_submodule("post_attention_layernorm")),
        gate_up=fused(*(_linear(mlp, name) for name in gate_up)),
        down=fused(_linear(mlp, "down_proj")),
        q_norm=_weight(getattr(attention, "q_norm", None)),
        k_norm=_weight(getattr(attention, "k_norm", None)),
    )


def _linear(parent: nn.Module, name: str) -> nn.Linear:
    found = parent.get_submodule(name)
    if not isinstance(found, nn.Linear):
        raise ValueError(f"{name} is a {type(found).__name__}")
    return found


def _weight(norm: nn.Module | None) -> torch.Tensor | None:
    weight = None if norm is None else getattr(norm, "weight", None)
    return None if weight is None else weight.detach()
