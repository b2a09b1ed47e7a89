"""Packs hold what `from_pretrained` would load, and nothing unsafe or unfit becomes a pack."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.errors import RegistrationRefused
from engine.pack import BLOB_NAME, SEGMENT_ALIGN, TENSOR_ALIGN, KvGroup, PackIndex, read_index
from engine.packs.weights import build_views, check_pack
from engine.registration import convert as convert_module
from engine.registration.convert import clean_leftovers, inspect, whole_pack, write_pack
from engine.registration.source import MAX_JSON_BYTES
from tests.engine.pack_rig import edit_json, flip_byte, hf_folder

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
SHAPE: dict[str, Any] = {
    **NO_IDS,
    "pad_token_id": None,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OLD_SHAPE: dict[str, Any] = {
    **NO_IDS,
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama_tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, **NO_IDS
    ),
    "gpt_neox": lambda: GPTNeoXConfig(intermediate_size=48, **OLD_SHAPE),
    "opt": lambda: OPTConfig(ffn_dim=48, word_embed_proj_dim=32, pad_token_id=1, **OLD_SHAPE),
    "phi3": lambda: Phi3Config(**SHAPE),
    "deepseek_v2": lambda: DeepseekV2Config(
        **SHAPE | {"num_key_value_heads": 4},
        kv_lora_rank=24,
        q_lora_rank=None,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    # Their checkpoints hold single experts, their modules stacked ones.
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2, head_dim=8
    ),
}


def quiet(phase: str, done: int, total: int) -> None:
    assert 0 <= done <= total
    assert phase in ("check", "convert")


def convert(folder: Path, dest: Path, dtype: Any = "auto") -> tuple[Path, PackIndex]:
    return write_pack(inspect(folder), dest, dtype, quiet)


def tensors_of(pack_dir: Path, index: PackIndex) -> dict[str, torch.Tensor]:
    blob = torch.from_numpy(np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8))
    return build_views(blob, index, [segment.offset for segment in index.segments], 1).tensors


def refusal(folder: Path, dest: Path) -> RegistrationRefused:
    with pytest.raises(RegistrationRefused) as caught:
        convert(folder, dest)
    assert not dest.exists() or not any(dest.iterdir())
    return caught.value


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "llama", LlamaConfig(**SHAPE))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_holds_what_from_pretrained_loads(tmp_path: Path, family: str) -> None:
    folder = hf_folder(tmp_path / "model", FAMILIES[family]())
    pack_dir, index = convert(folder, tmp_path / "packs")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    found = tensors_of(pack_dir, index)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for target, holder in index.tied.items():
        assert found[target].data_ptr() == found[holder].data_ptr()
    assert read_index(pack_dir) == index
    check_pack(pack_dir, index)


def test_layout_is_a_run_for_each_layer_and_the_rest(llama: Path, tmp_path: Path) -> None:
    _, index = convert(llama, tmp_path / "packs")
    assert [segment.name for segment in index.segments] == ["rest", "layer.0", "layer.1", "layer.2"]
    for entry in index.tensors:
        segment = index.segments[entry.segment].name
        assert entry.name.startswith(f"model.layers.{segment[6:]}.") or segment == "rest"
        assert entry.offset % TENSOR_ALIGN == 0
    assert all(s.offset % SEGMENT_ALIGN == s.num_bytes % SEGMENT_ALIGN == 0 for s in index.segments)
    assert (index.family, index.architecture) == ("llama", "LlamaForCausalLM")
    assert (index.vocab_size, index.max_context, index.dtype) == (97, 128, "float32")


def test_geometry_has_a_group_for_each_window(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", FAMILIES["gemma3"]())
    _, index = convert(folder, tmp_path / "packs")
    assert index.kv_groups == (KvGroup((0, 2), 2, 16, 16, 8), KvGroup((1,), 2, 16, 16, 0))


@pytest.mark.parametrize(
    ("stored", "asked", "made"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float32, "bfloat16", "bfloat16"),
        (torch.bfloat16, "float16", "float16"),
    ],
)
def test_dtypes(tmp_path: Path, stored: torch.dtype, asked: str, made: str) -> None:
    folder = hf_folder(tmp_path / "model", LlamaConfig(**SHAPE))
    weights = {
        name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors")
    pack_dir, index = convert(folder, tmp_path / "packs", asked)
    assert index.dtype == index.kv_dtype == made
    found = tensors_of(pack_dir, index)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, made)))


def test_what_float16_cannot_hold_is_refused(llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"][3] = 70_000
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RegistrationRefused, match="bfloat16") as caught:
        convert(llama, tmp_path / "packs", "float16")
    assert caught.value.code == "out_of_range"
    assert list((tmp_path / "packs").iterdir()) == []


@pytest.mark.parametrize(
    ("value", "stored", "asked", "code"),
    [
        (3.4e38, torch.float32, "bfloat16", "out_of_range"),
        (1e39, torch.float64, "float32", "out_of_range"),
        (-7e4, torch.bfloat16, "float16", "out_of_range"),
        (1e25, torch.float32, "int4", "bad_weights"),
    ],
)
def test_finite_weights_stay_finite(
    llama: Path, tmp_path: Path, value: float, stored: torch.dtype, asked: str, code: str
) -> None:
    weights = load_file(llama / "model.safetensors")
    weights = {name: tensor.to(stored) for name, tensor in weights.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][0, :2] = torch.tensor([value, value / 3], dtype=stored)
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RegistrationRefused) as caught:
        convert(llama, tmp_path / "packs", asked)
    assert caught.value.code == code
    assert name in str(caught.value)
    assert list((tmp_path / "packs").iterdir()) == []


def test_sharded_checkpoints_and_their_dangers(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", LlamaConfig(**SHAPE), max_shard_size="20KB")
    index_path = folder / "model.safetensors.index.json"
    assert index_path.exists()
    pack_dir, index = convert(folder, tmp_path / "packs")
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensors_of(pack_dir, index)[n], t) for n, t in expected.items())
    original = index_path.read_text()
    for shard in ("../outside.safetensors", "missing.safetensors"):
        content = json.loads(original)
        content["weight_map"]["x"] = shard
        index_path.write_text(json.dumps(content))
        assert refusal(folder, tmp_path / "elsewhere").code == "bad_weights"


def test_a_tied_head_in_the_files_counts_where_it_differs(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", FAMILIES["llama_tied"]())
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    _, same = convert(folder, tmp_path / "packs")
    assert same.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    weights["lm_head.weight"][3, 4] += 1
    save_file(weights, path, metadata={"format": "pt"})
    pack_dir, apart = convert(folder, tmp_path / "packs")
    assert apart.tied == {}
    assert torch.equal(tensors_of(pack_dir, apart)["lm_head.weight"], weights["lm_head.weight"])
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].to(torch.float64)
    save_file(weights, path, metadata={"format": "pt"})
    assert convert(folder, tmp_path / "packs")[1].tied == {}
    # Only the head is there: it holds the pair, as from_pretrained has it.
    embedding = weights.pop("model.embed_tokens.weight")
    weights["lm_head.weight"] = embedding
    save_file(weights, path, metadata={"format": "pt"})
    pack_dir, swapped = convert(folder, tmp_path / "packs")
    assert swapped.tied == {"model.embed_tokens.weight": "lm_head.weight"}
    assert torch.equal(tensors_of(pack_dir, swapped)["model.embed_tokens.weight"], embedding)


def test_a_base_model_checkpoint_gets_its_prefix(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", FAMILIES["gpt2"]())
    path = folder / "model.safetensors"
    weights = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # an old mask buffer, ignored by its family
    save_file(weights, path, metadata={"format": "pt"})
    pack_dir, index = convert(folder, tmp_path / "packs")
    found = tensors_of(pack_dir, index)
    assert torch.equal(found["transformer.h.0.ln_1.weight"], weights["h.0.ln_1.weight"])


def test_small_files_travel_along(llama: Path, tmp_path: Path) -> None:
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    (llama / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (llama / "README.md").write_text("not ours")
    pack_dir, index = convert(llama, tmp_path / "packs")
    names = {path.name for path in pack_dir.iterdir()}
    assert names == {*index.files, BLOB_NAME, "index.msgpack"}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert (pack_dir / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'


def test_revision_names_content_and_dtype(llama: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packs"
    first, _ = convert(llama, dest)
    stamp = (first / BLOB_NAME).stat().st_mtime_ns
    again, _ = convert(llama, dest)
    assert again == first
    assert (first / BLOB_NAME).stat().st_mtime_ns == stamp  # used as it was
    assert convert(llama, dest, "bfloat16")[0] != first
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    assert convert(llama, dest)[0] != first
    assert len(list(dest.iterdir())) == 3


@pytest.mark.parametrize("name", [BLOB_NAME, "index.msgpack", "tokenizer.json"])
def test_a_damaged_pack_is_made_anew(llama: Path, tmp_path: Path, name: str) -> None:
    pack_dir, index = convert(llama, tmp_path / "packs")
    flip_byte(pack_dir / name, 11)
    assert whole_pack(pack_dir) is None
    assert convert(llama, tmp_path / "packs") == (pack_dir, index)
    assert whole_pack(pack_dir) == index
    assert [path.name for path in (tmp_path / "packs").iterdir()] == [index.revision]


def test_a_pack_that_another_process_finished_meanwhile_stays(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be served already: nothing of it moves, not even for a moment."""
    elsewhere, _ = convert(llama, tmp_path / "other")
    final = tmp_path / "packs" / elsewhere.name
    build = convert_module._write_folder

    def overtaken(work: Any, folder: Path, progress: Any) -> PackIndex:
        index = build(work, folder, progress)
        elsewhere.rename(final)
        return index

    monkeypatch.setattr(convert_module, "_write_folder", overtaken)
    before = (elsewhere / BLOB_NAME).stat().st_ino
    made, index = convert(llama, tmp_path / "packs")
    assert (made, index) == (final, read_index(final))
    assert (final / BLOB_NAME).stat().st_ino == before
    assert [path.name for path in final.parent.iterdir()] == [final.name]


def test_a_pipe_is_no_weight_file(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    os.mkfifo(llama / "x.safetensors")
    with pytest.raises(RegistrationRefused) as refused:
        inspect(llama)
    assert refused.value.code == "no_weights"


def test_leftovers_of_dead_processes_are_removed(llama: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packs"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = dest / f".tmp-{gone.pid}-abc"
    alive = dest / f".tmp-{os.getppid()}-abc"
    for path in (dead, alive):
        path.mkdir(parents=True)
        (path / BLOB_NAME).write_text("half")
    clean_leftovers(dest)
    assert [path.name for path in dest.iterdir()] == [alive.name]


def test_a_full_disk_leaves_nothing_behind(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        convert(llama, tmp_path / "packs")
    assert list((tmp_path / "packs").iterdir()) == []


def test_pickled_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"never opened")
    convert(llama, tmp_path / "beside")  # safetensors win where both exist
    (llama / "model.safetensors").unlink()
    problem = refusal(llama, tmp_path / "packs")
    assert problem.code == "pickle_weights"
    assert "pytorch_model.bin" in str(problem)
    assert "safetensors" in str(problem)


def test_custom_code_is_refused(llama: Path, tmp_path: Path) -> None:
    (llama / "modeling_evil.py").write_text("raise SystemExit")
    assert refusal(llama, tmp_path / "packs").code == "custom_code"
    (llama / "modeling_evil.py").unlink()
    edit_json(llama / "config.json", lambda c: c.update(auto_map={"AutoModel": "modeling_x.X"}))
    assert refusal(llama, tmp_path / "packs").code == "custom_code"


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _config(**change: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda c: c.update(change))


def _weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


NORM = "model.layers.1.input_layernorm.weight"
REFUSALS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("no config", "bad_config", _drop("config.json")),
    ("broken config", "bad_config", _write("config.json", "{")),
    ("config is a list", "bad_config", _write("config.json", "[]")),
    ("no model_type", "bad_config", _config(model_type=None)),
    ("impossible shape", "bad_config", _config(num_attention_heads="four")),
    ("no context", "bad_config", _config(max_position_embeddings=0)),
    ("no end of context", "bad_config", _config(max_position_embeddings=1 << 40)),
    ("no end of layers", "bad_config", _config(num_hidden_layers=10**7)),
    ("architectures no list", "bad_config", _config(architectures=5)),
    ("unknown type", "unknown_family", _config(model_type="llama9")),
    ("an encoder", "unknown_family", _config(model_type="t5", architectures=None)),
    ("a classifier", "unknown_family", _config(architectures=["LlamaForSequenceClassification"])),
    ("quantized", "quantized_weights", _config(quantization_config={"quant_method": "gptq"})),
    ("no weights", "no_weights", _drop("model.safetensors")),
    ("truncated", "bad_weights", lambda f: os.truncate(f / "model.safetensors", 5000)),
    ("not safetensors", "bad_weights", _write("model.safetensors", "hello")),
    ("missing tensor", "bad_weights", _weights(lambda w: w.pop(NORM))),
    ("wrong shape", "bad_weights", _weights(lambda w: w.update({NORM: torch.ones(31)}))),
    ("left over", "bad_weights", _weights(lambda w: w.update(score=torch.ones(2)))),
    ("fewer layers", "bad_weights", _config(num_hidden_layers=2)),
    ("more layers", "bad_weights", _config(num_hidden_layers=4)),
    (
        "eight bits",
        "quantized_weights",
        _weights(lambda w: w.update({NORM: torch.ones(32).to(torch.float8_e4m3fn)})),
    ),
    (
        "integers",
        "quantized_weights",
        _weights(lambda w: w.update({NORM: torch.ones(32, dtype=torch.int8)})),
    ),
    ("no tokenizer", "no_tokenizer", _drop("tokenizer.json")),
    ("broken tokenizer options", "bad_config", _write("tokenizer_config.json", "[[[")),
    ("config without end", "bad_config", lambda f: os.truncate(f / "config.json", 1 << 36)),
    (
        "options without end",
        "bad_config",
        _write("special_tokens_map.json", "{}" + " " * MAX_JSON_BYTES),
    ),
]


@pytest.mark.parametrize(
    ("code", "damage"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_unfit_folders_are_refused(
    llama: Path, tmp_path: Path, code: str, damage: Callable[[Path], object]
) -> None:
    damage(llama)
    problem = refusal(llama, tmp_path / "packs")
    assert problem.code == code
    assert len(str(problem)) > 30  # it says what to do


def test_a_missing_expert_is_found(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", FAMILIES["mixtral"]())
    name = next(n for n in load_file(folder / "model.safetensors") if ".experts.3." in n)
    _weights(lambda w: w.pop(name))(folder)
    assert refusal(folder, tmp_path / "packs").code == "bad_weights"


def test_longrope_is_hosted_up_to_its_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    config = Phi3Config(**SHAPE, rope_parameters=rope, original_max_position_embeddings=32)
    _, index = convert(hf_folder(tmp_path / "model", config), tmp_path / "packs")
    assert index.max_context == 32


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere", tmp_path / "packs").code == "no_source"


def test_adapters_alone_are_not_a_model(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").rename(llama / "adapter_model.safetensors")
    assert refusal(llama, tmp_path / "packs").code == "no_weights"


def test_config_is_copied_verbatim(llama: Path, tmp_path: Path) -> None:
    pack_dir, _ = convert(llama, tmp_path / "packs")
    original = json.loads((llama / "config.json").read_text())
    assert json.loads((pack_dir / "config.json").read_text()) == original


def test_tensors_that_must_stay_fp32_do(tmp_path: Path) -> None:
    config = Glm4MoeConfig(
        **SHAPE, head_dim=8, n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=1
    )
    folder = hf_folder(tmp_path / "model", config)
    pack_dir, index = convert(folder, tmp_path / "packs", "bfloat16")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    found = tensors_of(pack_dir, index)
    assert {t.dtype for t in found.values()} == {torch.float32, torch.bfloat16}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
