"""A look at a model before anything is decided: what it is, what each dtype takes, or why not."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from engine.registration import main as register
from engine.registration.convert import inspect, write_pack
from engine.registration.preflight import KV_TOKENS
from tests.engine import hub_server
from tests.engine.hub_server import COMMIT, HubServer
from tests.engine.pack_rig import edit_json, hf_folder
from tests.engine.registration.quantized_kit import KINDS, write_checkpoint
from tests.engine.registration.test_convert import SHAPE

REPO = "acme/tiny"
CARD: dict[str, Any] = {
    "downloads": 1234,
    "likes": 5,
    "gated": "manual",
    "pipeline_tag": "text-generation",
    "tags": [
        "safetensors",
        "license:other",
        "base_model:acme/base",
        "base_model:finetune:acme/base",
    ],
    "cardData": {"license": "other", "license_name": "acme-community"},
    "config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "safetensors": {"parameters": {"BF16": 1000}, "total": 1000},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server.hub_server() as server:
        monkeypatch.setattr("engine.registration.hub.constants.ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        server.add(REPO, hf_folder(tmp_path / "model", LlamaConfig(**SHAPE)), **CARD)
        yield server


def look(tmp_path: Path, *more: str) -> dict[str, dict[str, Any]]:
    """The events by name, the last of each."""
    out = io.StringIO()
    register.main(("--inspect", "--dest", str(tmp_path / "packs"), "--pause-s", "0", *more), out)
    return {event["event"]: event for event in map(json.loads, out.getvalue().splitlines())}


def sizes(events: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {each["dtype"]: each["weight_bytes"] for each in events["preflight"]["choices"]}


def test_a_hub_model_is_described_from_its_small_files(hub: HubServer, tmp_path: Path) -> None:
    events = look(tmp_path, "--hub", f"{REPO}@main")
    said = events["resolved"]
    assert said["commit"] == COMMIT
    assert said["hub"] == {
        "id": REPO,
        "license": "acme-community",
        "gated": "manual",
        "downloads": 1234,
        "likes": 5,
        "task": "text-generation",
        "base_model": "acme/base",
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_parameters": 1000,
        "format": "safetensors",
        "custom_code": False,
        "sentences": False,
        "method": "",
    }
    assert events["described"]["model_type"] == "llama"
    found = events["preflight"]
    assert (found["architecture"], found["task"]) == ("LlamaForCausalLM", "generate")
    # Random models are saved in float32, of which each weight has four bytes.
    assert found["dtype"] == "float32"
    assert found["weight_bytes"] == 4 * found["num_parameters"]
    assert list(sizes(events)) == ["float32", "bfloat16", "int8", "fp8", "int4"]
    # fp8 has scales of twice the bytes of int8's.
    falling = [size for dtype, size in sizes(events).items() if dtype != "fp8"]
    assert sorted(falling, reverse=True) == falling
    assert sizes(events)["float32"] == found["weight_bytes"]
    assert [each["fits"] for each in found["choices"]] == [None] * 5
    assert 0 <= events["checked"]["parity_error"] < 1e-4
    fetched = [path for path, _ in hub.asked if "/resolve/" in path or "/lfs/" in path]
    assert not any(path.endswith(".safetensors") for path in fetched)
    assert not (tmp_path / "packs").exists()
    assert not list((tmp_path / "downloads").iterdir())


def test_neither_quota_nor_arena_end_an_inspection(hub: HubServer, tmp_path: Path) -> None:
    weights = sizes(look(tmp_path, "--hub", f"{REPO}@main"))
    room = ("--quota-bytes", "1", "--arena-bytes", str(weights["int4"] + (1 << 20)))
    events = look(tmp_path, "--hub", f"{REPO}@main", *room)
    assert "checked" in events
    fits = {each["dtype"]: each["fits"] for each in events["preflight"]["choices"]}
    assert fits["int4"]
    events = look(tmp_path, "--hub", f"{REPO}@main", "--arena-bytes", "1000")
    assert [each["fits"] for each in events["preflight"]["choices"]] == [False] * 5


def test_windows_bound_the_kv_of_a_long_sequence(tmp_path: Path) -> None:
    shape = {**SHAPE, "num_hidden_layers": 2}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**shape, head_dim=16, sliding_window=8, layer_types=kinds)
    events = look(tmp_path, "--source", str(hf_folder(tmp_path / "model", config)))
    a_token = 2 * 16 * config.num_key_value_heads * 4
    choice = events["preflight"]["choices"][0]
    assert choice["dtype"] == "float32"
    assert choice["kv_bytes"] == (KV_TOKENS + 8) * a_token


def test_a_quantized_folder_says_what_rounding_adds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", KINDS["nvfp4 modelopt"])
    events = look(tmp_path, "--source", str(tmp_path / "model"))
    assert events["preflight"]["source_format"] == "modelopt"
    added = [each["added_error"] for each in events["preflight"]["choices"]]
    assert added == [0.002, 0.014, 0.028, 0.0017]  # int4 keeps the codes
    assert "resolved" not in events


def test_experts_that_are_stacked_first_are_rounded_anew(tmp_path: Path) -> None:
    """What is said of int4 is what is done: no codes are kept, in memory or loss."""
    config = Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    )
    kind = replace(KINDS["awq"], model=lambda: config)
    write_checkpoint(tmp_path / "model", kind)
    events = look(tmp_path, "--source", str(tmp_path / "model"))
    choice = events["preflight"]["choices"][-1]
    assert (choice["dtype"], choice["added_error"]) == ("int4", 0.044)
    _, index = write_pack(inspect(tmp_path / "model"), tmp_path / "packs", "int4", lambda *_: None)
    assert choice["weight_bytes"] == sum(entry.num_bytes for entry in index.tensors)


def test_a_refused_model_is_still_described(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    edit_json(folder / "config.json", lambda config: config.update(model_type="nonsense"))
    hub.add(REPO, folder, **CARD)
    events = look(tmp_path, "--hub", f"{REPO}@main")
    assert events["described"]["model_type"] == "nonsense"
    assert events["resolved"]["hub"]["license"] == "acme-community"
    assert events["refused"]["code"] == "unknown_family"
    assert "checked" not in events


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("tiny-Q8_0.gguf", "no_weights", "has only GGUF files (tiny-Q8_0.gguf); download the one"),
        ("pytorch_model.bin", "pickle_weights", "use a revision with safetensors"),
    ],
)
def test_files_that_are_not_fetched_say_what_to_do(
    hub: HubServer, tmp_path: Path, name: str, code: str, said: str
) -> None:
    files = hub.repos[REPO]
    files[name] = files.pop("model.safetensors")
    events = look(tmp_path, "--hub", f"{REPO}@main")
    assert events["refused"]["code"] == code
    assert said in events["refused"]["message"]
    assert events["resolved"]["hub"]["base_model"] == "acme/base"
