"""A model that is one GGUF file becomes the pack of the weights that it stands for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.errors import RegistrationRefused
from engine.pack import BLOB_NAME, read_index
from engine.registration.download import check_listing
from engine.registration.hub import HubFile
from tests.engine.registration.gguf_kit import plain, write_gguf, write_model
from tests.engine.registration.quantized_kit import SHAPE
from tests.engine.registration.test_convert import convert
from tests.engine.registration.test_register import run

MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3moe": Qwen3MoeConfig(
        **SHAPE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=8, layer_types=["sliding_attention"]
    ),
}


def registered(folder: Path, dest: Path) -> tuple[int, list[dict[str, Any]]]:
    return run("--source", str(folder), "--dest", str(dest), "--dtype", "bfloat16")


@pytest.mark.parametrize("arch", MODELS)
def test_a_file_becomes_the_pack_of_its_weights(tmp_path: Path, arch: str) -> None:
    folder = tmp_path / "model"
    twin, _ = write_model(folder, arch, MODELS[arch])
    if arch == "gemma3":  # its metadata leave a configuration open
        (folder / "config.json").write_bytes((twin / "config.json").read_bytes())
    status, events = registered(folder, tmp_path / "packs")
    assert status == 0, events[-1]
    assert [event["source_format"] for event in events if event["event"] == "preflight"] == ["gguf"]
    made = Path(events[-1]["pack_dir"])
    wanted, index = convert(twin, tmp_path / "twin-packs", "bfloat16")
    assert read_index(made).tensors == index.tensors
    assert (made / BLOB_NAME).read_bytes() == (wanted / BLOB_NAME).read_bytes()
    said, original = (json.loads((at / "config.json").read_text()) for at in (made, twin))
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        assert said[name] == original[name]
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.encode("abca").ids == [0, 5, 1]
    options = json.loads((made / "tokenizer_config.json").read_text())
    assert options["chat_template"] == "{{ messages[0].content }}"
    assert sorted(path.name for path in folder.iterdir())[-1] == "model-Q8_0.gguf"


@pytest.mark.parametrize(
    ("more", "code", "why"),
    [
        ({"general.architecture": "mamba"}, "unknown_family", "llama, qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, "bad_config", "rope.scaling.type"),
        ({"llama.rope.dimension_count": 8}, "bad_config", "turns 8 values"),
        ({"llama.attention.sliding_window": 9}, "bad_config", "sliding_window"),
        ({"llama.block_count": 0}, "bad_config", "block_count"),
        ({"llama.attention.head_count": "four"}, "bad_config", "head_count"),
        ({"llama.block_count": 2}, "bad_weights", "missing"),
        ({"tokenizer.ggml.model": "rwkv"}, "no_tokenizer", "rwkv"),
        ({"tokenizer.ggml.merges": ["a"]}, "no_tokenizer", "no tokenizer can be made"),
    ],
)
def test_what_the_file_does_not_say_is_not_guessed(
    tmp_path: Path, more: dict[str, Any], code: str, why: str
) -> None:
    write_model(tmp_path / "model", "llama", MODELS["llama"], **more)
    status, events = registered(tmp_path / "model", tmp_path / "packs")
    assert (status, events[-1]["event"], events[-1]["code"]) == (1, "refused", code)
    assert why in events[-1]["message"]
    assert not (tmp_path / "packs").exists()


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3", MODELS["qwen3"])
    twin, _ = write_model(tmp_path / "llama", "llama", MODELS["llama"])
    (tmp_path / "model" / "config.json").write_bytes((twin / "config.json").read_bytes())
    _, events = registered(tmp_path / "model", tmp_path / "packs")
    assert events[-1]["code"] == "bad_config"
    assert "'qwen3'" in events[-1]["message"]


@pytest.mark.parametrize("said", ["{", "[]", '{"model_type": []}', '{"model_type": "llama"}'])
def test_a_damaged_configuration_beside_it_is_refused(tmp_path: Path, said: str) -> None:
    write_model(tmp_path / "model", "llama", MODELS["llama"])
    (tmp_path / "model" / "config.json").write_text(said)
    _, events = registered(tmp_path / "model", tmp_path / "packs")
    assert (events[-1]["event"], events[-1]["code"]) in (
        ("refused", "bad_config"),
        ("refused", "bad_weights"),  # a usual llama, which this is not
    )
    assert not (tmp_path / "packs").exists()


def test_one_file_is_taken_and_not_several(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "llama", MODELS["llama"])
    write_gguf(folder / "model-Q4_0.gguf", {}, {"t": plain(torch.ones(4))})
    (folder / "config.json").write_text(json.dumps(MODELS["llama"].to_dict()))
    _, events = registered(folder, tmp_path / "packs")
    assert events[-1]["code"] == "no_weights"
    assert "has 2 GGUF files" in events[-1]["message"]


def test_a_hubs_repository_of_them_is_refused_before_anything_is_fetched() -> None:
    files = [HubFile("model-Q4_K_M.gguf", 1 << 30, "", "0"), HubFile("README.md", 10, "0", "")]
    with pytest.raises(RegistrationRefused, match="register the folder") as caught:
        check_listing("someone/model", files)
    assert caught.value.code == "no_weights"
