"""`polyhost models search` and `inspect`: against a hub stub, and what they print."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from transformers import LlamaConfig

from admin.cli import find_models
from admin.registration import preflight
from admin.registration.preflight import NO_ANSWER, Preflight, search_hub
from admin.registration.register_process import HostingOption, HubModel, RegisterEvent
from gateway.settings.settings import Settings
from registry.errors import InvalidValue, RegistryError
from tests.admin.cli.conftest import Run
from tests.engine.hub_server import COMMIT, HubServer, hub_server
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.test_convert import SHAPE

REPO = "acme/tiny-llama"
HUB = HubModel("acme/m", license="mit", gated="auto", downloads=12345, base_model="acme/base")
CHOICES = [
    HostingOption("bfloat16", 4 << 30, 0.0, 128 << 20, False),
    HostingOption("int4", 1 << 30, 0.088, 128 << 20, True),
]
FOUND = RegisterEvent(
    "preflight", "acme/m", family="gemma3", architecture="Gemma3ForCausalLM", wrapper="gemma3",
    hosted_as="text class", num_parameters=4_300_000_000, max_context=8192, dtype="bfloat16",
    download_bytes=8 << 30, choices=CHOICES,
)  # fmt: skip
DESCRIBED = RegisterEvent(
    "described", "acme/m", model_type="gemma3", text_type="gemma3_text", architecture="Gemma3"
)
SEEN = Preflight(
    "acme/m", FOUND, COMMIT, hub=HUB, described=DESCRIBED, parity_error=2e-6
)  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        monkeypatch.setenv("POLYHOST_HUB_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        folder = hf_folder(tmp_path / "model", LlamaConfig(**SHAPE))
        server.add(REPO, folder, downloads=7, tags=["safetensors", "license:mit"])
        yield server


def see(monkeypatch: pytest.MonkeyPatch, seen: Preflight) -> None:
    monkeypatch.setattr(find_models, "inspect", lambda *_, **__: seen)


def test_a_hub_model_is_inspected_and_found_without_a_data_folder(
    run: Run, hub: HubServer, data_dir: Path
) -> None:
    told = json.loads(run("models", "inspect", REPO, "--revision", "main", "--json"))
    assert told["can_be_hosted"] is True
    assert told["commit"] == COMMIT
    assert told["hub"]["license"] == "mit"
    assert told["hosted_architecture"] == "LlamaForCausalLM"
    assert [each["dtype"] for each in told["choices"]] == [
        "float32",
        "bfloat16",
        "int8",
        "fp8",
        "int4",
    ]
    assert not any("/lfs/" in path for path, _ in hub.asked)
    (found,) = json.loads(run("models", "search", "tiny-llama", "--json"))
    assert (found["id"], found["license"], found["verdict"]) == (REPO, "mit", "unknown")
    assert not data_dir.exists()


def test_an_inspection_in_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, SEEN)
    text = run("models", "inspect", "acme/m")
    facts = dict(line.split("  ", 1) for line in text.split("\n\n")[0].splitlines())
    assert {name: said.strip() for name, said in facts.items()} == {
        "model": f"acme/m, commit {COMMIT[:12]}",
        "type": "gemma3 (Gemma3), text part gemma3_text",
        "published as": "bfloat16",
        "hosted as": "text class, Gemma3ForCausalLM",
        "task": "generation",
        "parameters": "4.3B",
        "context": "8192 tokens",
        "download": "8.0 GiB",
        "licence": "mit",
        "access": "gated: accept its licence on the hub",
        "downloads": "12,345 in 30 days",
        "made from": "acme/base",
        "can be hosted": "yes, the parity probe passed (largest error 2e-06)",
    }
    table = text.split("\n\n")[1].splitlines()
    assert table[1].split() == ["bfloat16", "(auto)", "4.0", "GiB", "128.0", "MiB", "none", "no"]
    assert table[2].split() == ["int4", "1.0", "GiB", "128.0", "MiB", "8.8%", "yes"]


def test_a_refusal_is_an_answer_and_a_failure_is_none(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = msgspec.structs.replace(HUB, model_type="llama", format="gguf")
    see(monkeypatch, Preflight("acme/m", code="no_weights", reason="only GGUF files", hub=hub))
    text = run("models", "inspect", "acme/m")
    assert "llama, as the hub says" in text
    assert "no (no_weights): only GGUF files" in text
    assert "polyhost models inspect acme/base" in text
    assert json.loads(run("models", "inspect", "acme/m", "--json"))["can_be_hosted"] is False
    see(monkeypatch, Preflight("acme/m", code="network", reason="the hub is away"))
    assert run("models", "inspect", "acme/m", status=1) == "polyhost: the hub is away (network)\n"


def test_the_list_of_a_search(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        RegisterEvent("found", "m", hub=HUB, verdict="likely"),
        RegisterEvent("found", "m", hub=HubModel("a/b"), verdict="no", code="custom_code"),
    ]
    asked: list[object] = []

    def found(settings: Settings, *wanted: object) -> list[RegisterEvent]:
        asked.append(wanted)
        return events

    monkeypatch.setattr(find_models, "search_hub", found)
    lines = run("models", "search", "two", "words", "--author", "acme").splitlines()
    assert asked == [("two words", 20, "acme", "")]
    assert lines[1].split() == ["acme/m", "12,345", "mit", "auto", "-", "-", "-", "likely"]
    assert lines[2].endswith("no: custom_code")
    events.clear()
    assert run("models", "search", "nothing") == ""
    run("models", "search", "x", "--limit", "101", status=2)


def test_a_source_names_its_revision_once(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "data"))
    with pytest.raises(InvalidValue, match="names a revision already"):
        preflight.inspect(settings, "acme/m@main", "v1")
    with pytest.raises(InvalidValue, match="neither a folder nor a model ID"):
        preflight.inspect(settings, "/nowhere")


def test_a_process_that_dies_or_answers_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=str(tmp_path))
    command = (sys.executable, "-c", "import sys; sys.exit('out of memory')")
    seen = preflight.inspect(settings, "acme/m", command=command)
    assert (seen.code, seen.reason) == ("crashed", "it crashed: out of memory")
    assert "out of memory" in (tmp_path / "logs" / "register.log").read_text()
    with pytest.raises(RegistryError, match=r"out of memory \(crashed\)"):
        search_hub(settings, "m", 5, command=command)
    monkeypatch.setattr(preflight, "INSPECT_TIMEOUT_S", 0.3)
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    assert preflight.inspect(settings, "acme/m", command=command).code == NO_ANSWER
