"""The verbs about registering, with a subprocess that speaks the engine's protocol; once the real.

Cancel, retry, update and roll-back; what is kept for a retry and for how long; the token.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from transformers import LlamaConfig

from engine.protocol import PACK_VERSION
from gateway.cli.main import main
from gateway.registration import register_process, registrar, registration, registration_files
from gateway.registration.registrar import Progress
from gateway.service import models as service_models
from gateway.service.control import Control, open_control
from gateway.settings import Settings
from registry import locks
from registry.catalog import NEXT, ModelRecord
from registry.errors import IllegalTransition, InvalidValue, NotFound, RegistryError
from registry.session import upgrade
from tests.engine.hub_server import hub_server
from tests.engine.pack_rig import hf_folder
from tests.engine.packs.test_convert import SHAPE
from tests.gateway.registration.test_registrar import FAKE, folder


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    settings = Settings(data_dir=str(tmp_path / "data"))
    upgrade(settings.registry_url)
    with open_control(settings, "test") as control:
        yield control


def add(control: Control, source: str, name: str = "m", revision: str = "") -> ModelRecord:
    begun = registration.begin(control, name, source, revision=revision)
    (model,) = registrar.run(control, [begun], command=FAKE)
    return model


def downloads(control: Control) -> list[str]:
    return sorted(path.name for path in (control.data_dir / "downloads").glob("*"))


def cli(control: Control, *arguments: str) -> int:
    return main([*arguments, "--data-dir", str(control.data_dir)])


def test_a_hub_model_keeps_what_was_asked_for_and_the_commit(control: Control) -> None:
    seen: list[Progress] = []
    begun = registration.begin(control, "m", "acme/good", revision="v1")
    (model,) = registrar.run(control, [begun], seen.append, FAKE)
    assert (model.state, model.source, model.requested_revision) == ("ready", "acme/good", "v1")
    assert model.source_commit == "2" * 40
    told = [progress.preflight for progress in seen if progress.preflight]
    assert [event.download_bytes for event in told] == [50]
    assert downloads(control) == []


def test_cancel_ends_it_wherever_it_runs(
    control: Control, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = registration.begin(control, "m", "acme/slow")
    running = threading.Event()

    def show(progress: Progress) -> None:
        if progress.phase == "download":
            running.set()

    def stop() -> None:
        running.wait(30)
        assert downloads(control)
        assert cli(control, "models", "cancel", "m") == 0

    canceller = threading.Thread(target=stop)
    canceller.start()
    (model,) = registrar.run(control, [begun], show, FAKE)
    canceller.join()
    assert (model.state, model.reason_code) == ("failed", "cancelled")
    assert "cancelled by cli:" in model.reason
    assert "is cancelled" in capsys.readouterr().out
    assert downloads(control) == []
    with locks.hold(control.data_dir / locks.PACKS_LOCK):
        pass  # nobody writes packs
    with pytest.raises(IllegalTransition, match="is failed, not being registered"):
        registration.cancel(control, "m")
    with pytest.raises(NotFound):
        registration.cancel(control, "none")


def test_a_registration_nobody_works_for_any_more_can_be_cancelled(control: Control) -> None:
    begun = registration.begin(control, "m", "acme/slow")
    assert registration.cancel(control, "m").registration == begun.registration
    assert service_models.show_model(control, "m").reason_code == "cancelled"


def test_a_retry_goes_on_with_the_commit_and_what_was_fetched(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = add(control, "acme/flaky", revision="main")
    assert (model.state, model.reason_code) == ("failed", "network")
    assert "models retry m" in model.reason
    assert downloads(control) == [f"acme--flaky@{'4' * 40}"]
    service_models.list_models(control)
    begun = registration.begin_retry(control, "m")
    assert register_process.source_name(begun) == f"acme/flaky@{'4' * 40}"
    (model,) = registrar.run(control, [begun], command=FAKE)
    assert (model.state, model.requested_revision) == ("ready", "main")
    assert downloads(control) == []
    with pytest.raises(IllegalTransition, match="nothing to retry"):
        registration.begin_retry(control, "m")


def test_what_is_kept_is_kept_for_a_time(control: Control, tmp_path: Path) -> None:
    model = add(control, "acme/flaky")
    (name,) = downloads(control)
    (control.data_dir / "downloads" / "strange").mkdir()
    service_models.list_models(control)
    assert downloads(control) == [name]
    later = Control(
        control.engine,
        control.data_dir,
        "test",
        clock=lambda: (model.heartbeat_at or 0.0) + control.settings.download_keep_s + 1,
    )
    service_models.list_models(later)
    assert downloads(control) == []
    add(control, "acme/flaky", "other")
    assert downloads(control) == [name]
    service_models.remove_model(control, "other")
    assert downloads(control) == [name]  # m may go on with it too
    service_models.remove_model(control, "m")
    assert downloads(control) == []


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(control: Control) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        for owner in (process.pid, os.getpid()):
            (control.packs_dir / f".tmp-{owner}-abc").mkdir(parents=True)
        service_models.list_models(control)
        assert len(list(control.packs_dir.iterdir())) == 2
        process.kill()
    service_models.list_models(control)
    assert [path.name for path in control.packs_dir.iterdir()] == [f".tmp-{os.getpid()}-abc"]


def test_update_and_rollback(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    first = add(control, "acme/good", revision="v1")
    begun = registration.begin_update(control, "m", revision="main")
    assert begun.name == f"m{NEXT}"
    (second,) = registrar.run(control, [begun], command=FAKE)
    assert (second.name, second.state, second.source_commit) == ("m", "ready", "4" * 40)
    assert second.registration == begun.registration
    assert service_models.sweep_packs(control.data_dir, control.engine) == []
    assert cli(control, "models", "rollback", "m") == 0
    assert service_models.show_model(control, "m").revision == first.revision
    assert cli(control, "models", "rollback", "m") == 1
    assert cli(control, "models", "rollback", "m", "--to", "4444") == 0
    assert cli(control, "models", "revisions", "m", "--json") == 0
    shown = capsys.readouterr().out
    rows = json.loads(shown[shown.index("[") :])
    assert [(row["revision"], row["current"]) for row in rows] == [
        (first.revision, False),
        (second.revision, True),
    ]
    # One that lost its pack is not switched to.
    (control.packs_dir / first.pack / "weights.bin").unlink()
    (control.packs_dir / first.pack).rmdir()
    with pytest.raises(RegistryError, match="is gone"):
        service_models.roll_back(control, "m")
    assert service_models.show_model(control, "m").revision == second.revision
    # Nor one of a format that workers no longer read.
    (control.packs_dir / first.pack).mkdir()
    index = msgspec.msgpack.encode({"version": PACK_VERSION - 1}) + bytes(8)
    (control.packs_dir / first.pack / registration_files.PACK_INDEX).write_bytes(index)
    with pytest.raises(RegistryError, match="earlier release"):
        service_models.roll_back(control, "m")
    assert service_models.show_model(control, "m").revision == second.revision


def test_an_update_of_a_hub_model_stays_with_the_hub(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(control, "acme/good", revision="v1")
    (tmp_path / "acme" / "good").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    begun = registration.begin_update(control, "m")
    assert (begun.source, begun.requested_revision) == ("acme/good", "v1")


def test_sources_that_are_no_names_of_folders(control: Control, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff")
    odd.mkdir()
    for source in ("~nobody-is-called-so/x", "a" * 5000, str(odd)):
        with pytest.raises(InvalidValue):
            registration.begin(control, "m", source)


def test_a_reason_is_one_line_that_a_terminal_only_shows(control: Control, tmp_path: Path) -> None:
    said = "holds a \x1b[2JEvil\n  and\u202emore"
    model = add(control, folder(tmp_path, "bad", refuse=said))
    assert model.reason == "holds a [2JEvil and more"


def test_an_update_that_fails_or_is_cancelled_leaves_the_model_serving(
    control: Control, tmp_path: Path
) -> None:
    good = folder(tmp_path, "good")
    served = add(control, good)
    bad = folder(tmp_path, "bad", refuse="weights.bin is a pickle")
    (failed,) = registrar.run(control, [registration.begin_update(control, "m", bad)], command=FAKE)
    assert (failed.name, failed.state) == (f"m{NEXT}", "failed")
    registration.begin_update(control, "m", "acme/slow")
    assert registration.cancel(control, "m").name == f"m{NEXT}"
    now = service_models.show_model(control, "m")
    assert (now.state, now.revision) == ("ready", served.revision)
    (tmp_path / "bad" / "refuse").unlink()
    again = registration.begin_update(control, "m")
    assert again.source == good  # as it was, whatever failed in between
    with pytest.raises(InvalidValue, match="--revision"):
        registration.begin_update(control, "m", good, revision="v1")
    with pytest.raises(InvalidValue, match="registry's own"):
        registration.begin(control, f"m{NEXT}", good)


def test_the_token_is_on_no_command_line(control: Control, tmp_path: Path) -> None:
    settings = Settings(
        data_dir=str(control.data_dir), hub_token="hf_secret", hub_endpoint="http://mirror"
    )
    begun = registration.begin(control, "m", "acme/good")
    arguments = register_process.arguments(settings, control.data_dir, "auto", [begun])
    assert "hf_secret" not in " ".join(arguments)
    environment = register_process.environment(settings)
    assert (environment["HF_TOKEN"], environment["HF_ENDPOINT"]) == ("hf_secret", "http://mirror")


def polyhost(control: Control, url: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments, "--data-dir", str(control.data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "POLYHOST_HUB_ENDPOINT": url, "NO_PROXY": "127.0.0.1"},
    )


def test_the_command_line_killed_midway_and_tried_again(control: Control, tmp_path: Path) -> None:
    """The real processes: a download over HTTP, kill -9, a retry that fetches only the rest."""
    source = hf_folder(tmp_path / "tiny", LlamaConfig(**{**SHAPE, "hidden_size": 64}))
    name = "model.safetensors"
    with hub_server() as hub:
        hub.add("acme/tiny", source)
        hub.faults.hold = {name: threading.Event()}
        options = ("models", "add", "m", "--source", "acme/tiny", "--dtype", "float32")
        with polyhost(control, hub.url, *options) as first:
            while not hub.sent[name]:
                assert first.poll() is None
                time.sleep(0.01)
            first.send_signal(signal.SIGKILL)
        fetched = hub.sent[name]
        (kept,) = (control.data_dir / "downloads").iterdir()
        while (part := kept / f"{name}.part").stat().st_size < fetched:
            time.sleep(0.01)
        with locks.hold(control.data_dir / locks.PACKS_LOCK, timeout_s=30):
            pass  # the orphan has ended by itself
        hub.faults.hold[name].set()
        model = service_models.show_model(control, "m")
        assert (model.state, model.reason_code) == ("failed", "interrupted")
        assert part.exists()
        hub.sent.clear()
        with polyhost(control, hub.url, "models", "retry", "m") as second:
            output, _ = second.communicate()
    assert second.returncode == 0, output
    assert "m is ready (llama, float32" in output
    assert "m: probe" in output
    assert "to fetch" in output
    assert hub.sent[name] == len(hub.repos["acme/tiny"][name]) - fetched
    assert downloads(control) == []
