"""Absurd numbers in a model's files and weights: refused with the place they are at."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig

from engine.errors import RegistrationRefused
from engine.registration.convert import inspect, write_pack
from engine.registration.preflight import judge
from tests.engine.pack_rig import edit_json, hf_folder
from tests.engine.registration.test_convert import SHAPE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("numbers") / "model", LlamaConfig(**SHAPE))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def refusal(read: Callable[[], object]) -> RegistrationRefused:
    with pytest.raises(RegistrationRefused) as caught:
        read()
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", 10**30),
        ("eos_token_id", [1, 1 << 31]),
        ("eos_token_id", -2),
        ("eos_token_id", 1.5),
        ("bos_token_id", 1 << 40),
        ("pad_token_id", -2),
        ("suppress_tokens", [3, 4.5, 1000]),
        ("begin_suppress_tokens", [-5]),
        ("forced_eos_token_id", 1 << 33),
        ("bad_words_ids", [[1], [2, -97]]),
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", 1.5),
        ("repetition_penalty", 0),
        ("max_length", 1 << 40),
        ("max_new_tokens", float("inf")),
        ("something_new", [{"deep": float("-inf")}]),
    ],
)
def test_a_generation_config_that_nobody_can_mean(model: Path, name: str, value: Any) -> None:
    content = {"eos_token_id": [1, 2], "temperature": 0.6, "top_k": None, "max_length": 20}
    (model / "generation_config.json").write_text(json.dumps({**content, name: value}))
    for read in (inspect, judge):
        error = refusal(lambda read=read: read(model))  # type: ignore[misc]
        assert error.code == "bad_config"
        assert f"{name}" in str(error)
        assert "generation_config.json" in str(error)
        assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", 10**12),
        ("rope_scaling", {"rope_type": "linear", "factor": float("nan")}),
        ("rope_scaling", {"rope_type": "linear", "factor": -4.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e300}),
        ("rms_norm_eps", float("inf")),
        ("unused", 10**40),
    ],
)
def test_a_config_that_nobody_can_mean(model: Path, name: str, value: Any) -> None:
    edit_json(model / "config.json", lambda content: content.update({name: value}))
    error = refusal(lambda: inspect(model))
    assert error.code == "bad_config"


def test_what_models_do_say_is_taken(model: Path) -> None:
    said = {
        "eos_token_id": [1, 96],
        "pad_token_id": -1,
        "top_k": -1,
        "temperature": 0.0,
        "mask_value": -3.4e38,
        "max_length": (1 << 31) - 1,
        "bad_words_ids": None,
    }
    (model / "generation_config.json").write_text(json.dumps(said))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"model_max_length": 1000000000000000019884624838656})
    )
    assert inspect(model).blueprint.vocab_size == 97


def test_tokens_without_rows_are_taken(model: Path) -> None:
    """A small GPT-2 is saved with the large one's end; a [PAD] was added and never used."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 96, "[PAD]": 97}, merges=[]))
    tokenizer.save(str(model / "tokenizer.json"))
    ids = {"bos_token_id": 50256, "eos_token_id": [50256, -1]}
    edit_json(model / "config.json", lambda content: content.update(ids))
    (model / "generation_config.json").write_text(json.dumps({**ids, "pad_token_id": 97}))
    assert inspect(model).blueprint.vocab_size == 97


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_weights_that_are_not_finite(model: Path, tmp_path: Path, bad: float, dtype: Any) -> None:
    path = model / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name].view(-1)[torch.randint(weights[name].numel(), ())] = bad
    save_file(weights, path, metadata={"format": "pt"})
    packs = tmp_path / "packs"
    error = refusal(lambda: write_pack(inspect(model), packs, dtype, lambda *_: None))
    assert (error.code, name in str(error)) == ("bad_weights", True)
    assert list(packs.iterdir()) == []
