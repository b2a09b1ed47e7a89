"""The layer of nine calls against transformers' own modules: by references, and by the kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from engine.registration.quantize import quantize_rows
from kernels.decoder_layer import KERNELS, REFERENCE, LayerStep, Operations, Product, decoder_layer
from kernels.int4_layouts import dequantize, quantize
from kernels.paged_attention import LayerGeometry
from kernels.rms_norm import rms_norm_ref
from kernels.scaled_linear import quantize_fp8
from tests.kernels.layer_weights import form_of, fused, weights_of
from tests.kernels.paged_cache import Cache

SIZE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZE),
    "llama-biased": LlamaConfig(**SIZE, attention_bias=True),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=16),
    "mistral": MistralConfig(**SIZE, sliding_window=5),
    "phi3": Phi3Config(**SIZE),
    "phi3-partial": Phi3Config(
        **SIZE,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "granite": GraniteConfig(
        **SIZE, residual_multiplier=0.3, attention_multiplier=0.2, embedding_multiplier=6.0
    ),
    "olmo": OlmoConfig(**SIZE),
    "gemma": GemmaConfig(**SIZE, head_dim=8, hidden_act="gelu_pytorch_tanh"),
}
LENGTHS = (7, 3)
NEW = 1


def model_of(config: PretrainedConfig) -> nn.Module:
    """Random weights everywhere, norms and biases too."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        scale = 0.5 if parameter.dim() == 1 else 2 * parameter.shape[1] ** -0.5
        nn.init.normal_(parameter, 0.3 * (parameter.dim() == 1), scale, generator=generator)
    base: nn.Module = model.model.eval().requires_grad_(False)
    return base


def window_of(config: PretrainedConfig, layer: int) -> int:
    kinds = getattr(config, "layer_types", None)
    sliding = kinds[layer] == "sliding_attention" if kinds else config.model_type == "mistral"
    return int(config.sliding_window) if sliding else 0


def ours(
    base: nn.Module, config: PretrainedConfig, ids: list[torch.Tensor], operations: Operations
) -> list[list[torch.Tensor]]:
    """Hidden states after the last norm, [prefill, decode] by sequence, of two flat steps."""
    layers, rotary = base.get_submodule("layers"), base.get_submodule("rotary_emb")
    assert isinstance(layers, nn.ModuleList)
    built = [(weights_of(layer), form_of(layer, config)) for layer in layers]
    form = built[0][1]
    caches = [
        Cache(
            LayerGeometry(form.num_kv_heads, form.head_dim, form.head_dim, window_of(config, i)),
            torch.float32,
            len(ids),
            max(LENGTHS) + NEW,
            block_tokens=4,
            seed=i,
        )
        for i in range(len(layers))
    ]
    out: list[list[torch.Tensor]] = [[] for _ in ids]
    group = form.num_heads // form.num_kv_heads
    for rows in ([(0, len(seq) - NEW) for seq in ids], [(len(seq) - NEW, NEW) for seq in ids]):
        places = torch.cat([torch.arange(first, first + n) for first, n in rows])
        tokens = torch.cat([seq[f : f + n] for seq, (f, n) in zip(ids, rows, strict=True)])
        x, residual = base.get_submodule("embed_tokens")(tokens), None
        x = x * getattr(config, "embedding_multiplier", 1.0)
        cos, sin = rotary(x[None], places[None])
        half = cos.shape[-1] // 2
        for (weights, form), cache in zip(built, caches, strict=True):
            laid = cache.step(rows, group)
            step = LayerStep(
                cache.arena,
                cache.geometry,
                cache.table,
                laid.batch,
                cos[0, :, :half],
                sin[0, :, :half],
                laid.rows,
                laid.tiles,
            )
            x, residual = decoder_layer(x, residual, weights, form, step, operations)
        assert residual is not None
        hidden = base.get_submodule("norm")(residual + form.residual_multiplier * x)
        for found, part in zip(out, hidden.split([n for _, n in rows]), strict=True):
            found.append(part)
    return out


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (length + NEW,), generator=generator) for length in LENGTHS]


def assert_same(name: str, operations: Operations, tolerance: float) -> None:
    config = CONFIGS[name]
    base, ids = model_of(config), sequences()
    for seq, found in zip(ids, ours(base, config, ids, operations), strict=True):
        wanted = base(input_ids=seq[None]).last_hidden_state[0]
        torch.testing.assert_close(torch.cat(found), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_references_are_the_modules(name: str) -> None:
    assert_same(name, REFERENCE, 1e-4)


@pytest.mark.parametrize("name", ["qwen3", "granite", "mistral", "gemma"])
def test_kernels_are_the_modules(name: str) -> None:
    assert_same(name, KERNELS, 1e-4)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_quantized_products(kind: str) -> None:
    """A layer over quantized weights is the layer over what they stand for."""
    base = model_of(CONFIGS["qwen2"])
    layer = base.get_submodule("layers.0")
    for child in ("self_attn.o_proj", "mlp.down_proj"):
        linear = layer.get_submodule(child)
        assert isinstance(linear, nn.Linear)
        weight = linear.weight.detach()
        if kind == "int4":
            packed = quantize(weight, 32, torch.float32)
            product, exact = Product(packed), dequantize(packed)
        else:
            made = quantize_fp8 if kind == "fp8" else quantize_rows
            q, scale = made(weight, torch.float32)
            product, exact = Product(q, None, scale), q.float() * scale[:, None]
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        for operations in (REFERENCE, KERNELS):
            torch.testing.assert_close(
                operations.product(x, product), x @ exact.T, rtol=1e-5, atol=1e-5
            )


def test_a_wrong_layer_is_caught() -> None:
    """What the families differ in reaches the result."""
    config = CONFIGS["granite"]
    base, ids = model_of(config), sequences()
    wanted = base(input_ids=ids[0][None]).last_hidden_state[0]

    def skipping(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm_ref(*args, **{**kwargs, "multiplier": 1.0})

    for wrong in (
        replace(REFERENCE, norm=skipping),
        replace(REFERENCE, write=lambda q, k, v, form, step: REFERENCE.write(q, v, k, form, step)),
        replace(REFERENCE, attend=lambda q, f, s: REFERENCE.attend(q, replace(f, scale=1.0), s)),
    ):
        found = torch.cat(ours(base, config, ids, wrong)[0])
        assert not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)


def test_other_layers_are_refused() -> None:
    layer = model_of(Olmo2Config(**SIZE)).get_submodule("layers.0")
    with pytest.raises(ValueError, match="not a llama-like layer"):
        weights_of(layer)
    with pytest.raises(ValueError, match="some of the products"):
        fused(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
