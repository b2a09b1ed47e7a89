"""A search on a hub: what is asked, what is taken of the answer, and the verdict on each model."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.registration import main as register
from engine.registration.hub_models import MAX_TEXT, read_model
from engine.registration.outlook import outlook
from tests.engine import hub_server
from tests.engine.hub_server import HubServer
from tests.engine.running.test_families import HOSTED, told

SAFE = {"tags": ["safetensors"]}
CARDS: dict[str, dict[str, Any]] = {
    "acme/small-llama": {
        "downloads": 50,
        "cardData": {"license": "apache-2.0"},
        "config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "safetensors": {"total": 8_000_000_000},
        "pipeline_tag": "text-generation",
    },
    "acme/large-llama-AWQ": {
        "downloads": 90,
        "gated": "auto",
        "config": {
            "model_type": "llama",
            "quantization_config": {"quant_method": "awq", "bits": 4},
        },
        "safetensors": {"parameters": {"I32": 100, "F16": 7}},
    },
    "other/llama-GGUF": {
        "downloads": 70,
        "gguf": {"total": 9, "architecture": "llama"},
        "tags": ["gguf", "base_model:quantized:acme/small-llama"],
    },
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server.hub_server() as server:
        monkeypatch.setattr("engine.registration.hub.constants.ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        server.cards = dict(CARDS)
        yield server


def find(*arguments: str) -> list[dict[str, Any]]:
    out = io.StringIO()
    options = ("--dest", "/nowhere", "--pause-s", "0", "--timeout-s", "5")
    status = register.main(("--search", *arguments, *options), out)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert status == (1 if events and events[-1]["event"] == "refused" else 0)
    return events


def test_what_is_found_comes_by_downloads_with_a_verdict(hub: HubServer) -> None:
    events = find("LLAMA")
    assert [event["hub"]["id"] for event in events] == [
        "acme/large-llama-AWQ",
        "other/llama-GGUF",
        "acme/small-llama",
    ]
    assert [event["verdict"] for event in events] == ["likely", "unknown", "likely"]
    awq, packed, plain = (event["hub"] for event in events)
    assert (awq["method"], awq["gated"], awq["num_parameters"]) == ("awq", "auto", 107)
    assert (packed["format"], packed["base_model"]) == ("gguf", "acme/small-llama")
    assert (plain["license"], plain["num_parameters"]) == ("apache-2.0", 8_000_000_000)
    assert "into a folder of its own" in events[1]["reason"]
    assert [path for path, _ in hub.asked] == ["/api/models"], "nothing is fetched"


def test_author_task_and_limit_are_the_hubs(hub: HubServer) -> None:
    assert [event["hub"]["id"] for event in find("llama", "--author", "other")] == [
        "other/llama-GGUF"
    ]
    assert len(find("llama", "--task", "text-generation")) == 1
    assert len(find("llama", "--limit", "2")) == 2
    assert len(find("llama", "--limit", "0")) == 1
    assert find("nothing of this name") == []


def test_entries_that_cannot_be_right_are_passed_over(hub: HubServer) -> None:
    hub.cards["llama/../../etc"] = {}
    hub.cards["acme/llama-wrong"] = {
        "downloads": True,
        "gated": ["\x1b[31m"],
        "config": "text",
        "tags": [7, "license:\x1b[2J", "a" * 500],
        "safetensors": {"parameters": {"BF16": -5}},
    }
    found = {event["hub"]["id"]: event for event in find("llama")}
    assert "llama/../../etc" not in found
    wrong = found["acme/llama-wrong"]["hub"]
    assert (wrong["downloads"], wrong["gated"], wrong["license"]) == (0, "", "")
    assert found["acme/llama-wrong"]["verdict"] == "unknown"
    assert read_model({"id": "a" * (MAX_TEXT + 1)}, "asked/for").id == "asked/for"


def test_a_hub_that_fails_is_said(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.status["/api/models"] = (401, 1, "")
    assert find("llama")[-1]["code"] == "hub_denied"
    hub.faults.status["/api/models"] = (503, 99, "")
    assert find("llama", "--attempts", "2")[-1]["code"] == "network"
    assert find("x" * 300)[-1]["code"] == "bad_search"
    monkeypatch.setattr("engine.registration.hub.MAX_JSON_BYTES", 10)
    hub.faults.status.clear()
    assert find("llama")[-1]["code"] == "bad_hub"


def test_the_token_goes_with_a_search(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    find("llama")
    assert hub.tokens == [("/api/models", "Bearer hf_secret")]


def entry(model_type: str = "", *named: str, method: str = "", **more: Any) -> dict[str, Any]:
    """One of a hub's answer; safetensors where `more` does not say otherwise."""
    config: dict[str, Any] = {"model_type": model_type, "architectures": list(named)}
    if method:
        config["quantization_config"] = {"quant_method": method}
    return {"config": config, **SAFE, **more}


@pytest.mark.parametrize(
    ("said", "verdict", "code"),
    [
        (entry("qwen3"), "likely", ""),
        (entry("qwen3", method="compressed-tensors"), "likely", ""),
        (entry("qwen3", method="hqq"), "no", "quantized_weights"),
        (entry("qwen3", tags=[]), "unknown", "no_weights"),
        (entry("qwen3", tags=["pytorch"]), "no", "pickle_weights"),
        (entry("qwen3", tags=["safetensors", "custom_code"]), "no", "custom_code"),
        (entry("nonsense"), "no", "unknown_family"),
        (entry("deepseek_v4"), "unlikely", "unknown_family"),
        (entry("t5", "T5Model"), "no", "unknown_family"),
        (entry("bert", "BertModel"), "likely", ""),
        (entry("bert", "BertForMaskedLM"), "no", "unknown_family"),
        (entry("bert", "BertForMaskedLM", library_name="sentence-transformers"), "likely", ""),
        (SAFE, "unknown", "bad_config"),
    ],
)
def test_verdicts(said: dict[str, Any], verdict: str, code: str) -> None:
    found = outlook(read_model(said, "acme/x"))
    assert (found.verdict, found.code) == (verdict, code)
    assert bool(found.reason) == (verdict != "likely")


def test_no_type_that_can_be_hosted_is_told_that_it_cannot() -> None:
    verdicts = {
        family: outlook(read_model({"config": {"model_type": family}, **SAFE})).verdict
        for family in told()
    }
    hosted = {family for family, how in told().items() if how in HOSTED}
    assert {verdicts[family] for family in hosted} == {"likely"}
    # The other way round not all can be told without a configuration and a probe.
    refused = [verdicts[family] for family in told() if family not in hosted]
    assert refused.count("likely") < len(refused) * 0.5


def test_older_answers_are_read() -> None:
    model = read_model({"modelId": "a/b", "cardData": {"license": ["mit", "gpl"]}})
    assert (model.id, model.license) == ("a/b", "mit, gpl")
