"""The registration process: its lines, its codes, its exit status.

Called in this process; as one of its own it runs in tests/e2e and in
tests/admin/registration/test_registration.py.
"""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from admin.cli.models import preflight_text
from admin.registration.register_process import RegisterEvent
from engine.errors import RegistrationRefused
from engine.pack import read_index
from engine.packs.weights import check_pack, verify_blob
from engine.registration import main as register
from engine.registration import parity
from tests.engine.pack_rig import edit_json, hf_folder
from tests.engine.registration.quantized_kit import KINDS, write_checkpoint
from tests.engine.registration.test_convert import SHAPE


def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out = io.StringIO()
    status = register.main(arguments, out)
    return status, [json.loads(line) for line in out.getvalue().splitlines()]


def last(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {event["source"]: event for event in events}


def test_one_call_registers_several_and_reports_each(tmp_path: Path) -> None:
    good = str(hf_folder(tmp_path / "good", LlamaConfig(**SHAPE)))
    bad = hf_folder(tmp_path / "bad", LlamaConfig(**SHAPE), seed=1)
    (bad / "model.safetensors").rename(bad / "pytorch_model.bin")
    options = ["--source", str(bad), "--source", good, "--dest", str(tmp_path / "packs")]
    status, events = run(*options, "--dtype", "float32")
    assert status == 1
    assert last(events)[str(bad)]["code"] == "pickle_weights"
    ready = last(events)[good]
    assert ready["event"] == "ready"
    index = read_index(Path(ready["pack_dir"]))
    check_pack(Path(ready["pack_dir"]), index)
    verify_blob(Path(ready["pack_dir"]), index)
    assert Path(ready["pack_dir"]).is_absolute()
    assert ready | {"parity_error": 0, "event": 0, "source": 0, "pack_dir": 0} == {
        "event": 0,
        "source": 0,
        "pack_dir": 0,
        "parity_error": 0,
        "revision": index.revision,
        "family": "llama",
        "max_context": 128,
        "vocab_size": 97,
        "weight_bytes": index.total_bytes,
        "dtype": "float32",
        "task": "generate",
        "dim": 0,
        "labels": [],
        "multi_label": False,
    }
    assert ready["parity_error"] < 1e-4
    phases = [event["phase"] for event in events if event["event"] == "progress"]
    assert list(dict.fromkeys(phases)) == ["probe", "check", "convert"]
    ends = [event for event in events if event.get("phase") == "convert"][-1]
    assert 0 < ends["done_bytes"] == ends["total_bytes"] <= index.total_bytes


def test_ready_again_without_writing(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path / "model", LlamaConfig(**SHAPE)))
    arguments = ("--source", folder, "--dest", str(tmp_path / "packs"))
    status, first = run(*arguments)
    again_status, again = run(*arguments)
    assert status == again_status == 0
    assert first[-1] == again[-1]
    assert all(event.get("phase") != "convert" for event in again)


def test_a_family_that_comes_out_wrong_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(config: Any, **options: Any) -> float:
        raise RegistrationRefused("parity", f"{config.model_type} differs")

    monkeypatch.setattr(parity, "probe", wrong)
    folder = str(hf_folder(tmp_path / "model", LlamaConfig(**SHAPE)))
    status, events = run("--source", folder, "--dest", str(tmp_path / "packs"))
    assert status == 1
    assert events[-1] == {
        "event": "refused",
        "source": folder,
        "code": "parity",
        "message": "llama differs",
    }
    assert not (tmp_path / "packs").exists()


def test_a_destination_that_cannot_be_written_is_an_io_error(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path / "model", LlamaConfig(**SHAPE)))
    (tmp_path / "file").write_text("in the way")
    status, events = run("--source", folder, "--dest", str(tmp_path / "file"))
    assert status == 1
    assert events[-1]["code"] == "io_error"


def test_a_bug_in_one_folder_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: Any, **options: Any) -> float:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(parity, "probe", broken)
    folder = str(hf_folder(tmp_path / "model", LlamaConfig(**SHAPE)))
    missing = str(tmp_path / "missing")
    status, events = run("--source", folder, "--source", missing, "--dest", str(tmp_path / "packs"))
    assert status == 1
    assert last(events)[folder]["code"] == "internal_error"
    assert last(events)[missing]["code"] == "no_source"


def test_a_quantized_checkpoint_is_told_its_choices(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, KINDS["nvfp4 modelopt"])
    # As ModelOpt's exports have it: in a file of its own.
    edit_json(folder / "config.json", lambda c: c.pop("quantization_config"))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    status, events = run("--source", str(folder), "--dest", str(tmp_path / "packs"))
    assert status == 0, events[-1]
    found = next(event for event in events if event["event"] == "preflight")
    assert found["source_format"] == "modelopt"
    sizes = {choice["dtype"]: choice["weight_bytes"] for choice in found["choices"]}
    assert list(sizes) == ["bfloat16", "int8", "fp8", "int4"]
    assert sizes["bfloat16"] == found["weight_bytes"] > sizes["fp8"] > sizes["int8"] > sizes["int4"]
    assert all(0 <= choice["added_error"] < 0.1 for choice in found["choices"])
    ready = events[-1]
    assert (ready["event"], ready["dtype"]) == ("ready", "bfloat16")
    index = read_index(Path(ready["pack_dir"]))
    assert abs(index.total_bytes - sizes["bfloat16"]) < 4096 * len(index.segments)
    assert "hf_quant_config.json" not in index.files
    event = msgspec.json.decode(json.dumps(found), type=RegisterEvent)
    assert "quantized by modelopt, can be hosted as bfloat16" in preflight_text(event)
    assert "slow" not in preflight_text(event)
    assert "slow" in preflight_text(msgspec.structs.replace(event, dtype="fp8"))
