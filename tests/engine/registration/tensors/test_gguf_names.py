"""Names and orders of llama.cpp, one tensor at a time."""

from pathlib import Path

import pytest
import torch

from engine.errors import RegistrationRefused
from engine.registration.tensors import GgufFile
from engine.registration.tensors.gguf_names import ARCHITECTURES, find_gguf, number_in
from tests.engine.registration.gguf_kit import Blocks, paired, plain, q8_0, write_gguf


def found(
    folder: Path, arch: str, tensors: dict[str, Blocks], heads: tuple[int, int] = (4, 2)
) -> dict[str, torch.Tensor]:
    said = {"general.architecture": arch}
    counts = {f"{arch}.attention.head_count": heads[0], f"{arch}.attention.head_count_kv": heads[1]}
    path = write_gguf(folder / "x.gguf", said | counts, tensors)
    made = {}
    with GgufFile(path) as file:
        for name, quantized in find_gguf(file):
            rows, count = quantized.open(), quantized.shape[0]
            # Two pieces that divide nothing.
            made[name] = torch.cat([rows(0, min(3, count)), rows(min(3, count), count)])
            assert made[name].shape == quantized.shape
    return made


def test_rows_of_q_and_k_are_put_back(tmp_path: Path) -> None:
    q, k, bias = torch.randn(32, 64), torch.randn(16, 64), torch.randn(32)
    tensors = {
        "blk.7.attn_q.weight": plain(paired(q, 4)),
        "blk.7.attn_k.weight": q8_0(paired(k, 2))[0],
        "blk.7.attn_q.bias": plain(paired(bias, 4)),
        "blk.7.attn_v.weight": plain(k),
        "rope_freqs.weight": plain(torch.ones(4)),
    }
    made = found(tmp_path, "llama", tensors)
    prefix = "model.layers.7.self_attn."
    assert made.keys() == {
        f"{prefix}{name}"
        for name in ("q_proj.weight", "k_proj.weight", "q_proj.bias", "v_proj.weight")
    }
    assert torch.equal(made[f"{prefix}q_proj.weight"], q)
    assert torch.equal(made[f"{prefix}q_proj.bias"], bias)
    assert torch.equal(made[f"{prefix}v_proj.weight"], k)
    assert torch.equal(made[f"{prefix}k_proj.weight"], q8_0(k)[1])
    # Other architectures leave them as they are.
    assert torch.equal(found(tmp_path, "qwen2", tensors)[f"{prefix}q_proj.weight"], paired(q, 4))


def test_norms_of_gemma_are_kept_with_one_added(tmp_path: Path) -> None:
    norm = torch.randn(16)
    tensors = {
        "output_norm.weight": plain(norm),
        "blk.0.post_ffw_norm.weight": plain(norm),
        "blk.0.attn_q_norm.weight": plain(norm),
        "blk.0.attn_v.weight": plain(torch.ones(4, 16)),
    }
    made = found(tmp_path, "gemma3", tensors)
    for name in (
        "model.norm.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ):
        assert torch.equal(made[name], norm - 1), name
    assert bool((made["model.layers.0.self_attn.v_proj.weight"] == 1).all())


def test_experts_are_taken_apart(tmp_path: Path) -> None:
    experts = torch.randn(3, 8, 64)
    made = found(tmp_path, "qwen3moe", {"blk.1.ffn_up_exps.weight": q8_0(experts)[0]})
    assert len(made) == 3
    for number in range(3):
        values = made[f"model.layers.1.mlp.experts.{number}.up_proj.weight"]
        assert torch.equal(values, q8_0(experts)[1][number])


def test_unknown_names_stay_for_the_model_to_refuse(tmp_path: Path) -> None:
    made = found(tmp_path, "llama", {"blk.0.ssm_a": plain(torch.ones(3))})
    assert made.keys() == {"blk.0.ssm_a"}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    weight = {"blk.0.attn_q.weight": plain(torch.ones(32, 64))}
    with pytest.raises(RegistrationRefused, match="3 heads do not divide"):
        found(tmp_path, "llama", weight, heads=(3, 1))
    with pytest.raises(RegistrationRefused, match="in blocks of Q8_0"):
        found(tmp_path, "llama", {"output_norm.weight": q8_0(torch.ones(64))[0]})
    with pytest.raises(RegistrationRefused, match="has 4097 experts"):
        found(tmp_path, "qwen3moe", {"blk.0.ffn_up_exps.weight": plain(torch.ones(4097, 1, 1))})
    with pytest.raises(RegistrationRefused, match="are not supported"):
        found(tmp_path, "bert", weight)
    path = write_gguf(
        tmp_path / "x.gguf", {"general.architecture": "llama", "llama.x": "many"}, weight
    )
    with GgufFile(path) as file, pytest.raises(RegistrationRefused, match="for x"):
        number_in(file, "x")
    assert all(one.causal.endswith("ForCausalLM") for one in ARCHITECTURES.values())
