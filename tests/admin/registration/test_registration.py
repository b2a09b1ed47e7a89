"""The verbs about registering, with a subprocess that speaks the engine's protocol; once the real.

Cancel, retry, update and roll-back; what is kept for a retry and for how long; the token.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
from transformers import LlamaConfig

from admin.cli.main import main
from admin.context import registration_files
from admin.context.operator_context import OperatorContext
from admin.operations import models
from admin.operations import models as service_models
from admin.registration import register_process, registrar
from admin.registration.registrar import Progress
from engine.protocol import PACK_VERSION
from gateway.settings.settings import Settings
from registry import locks
from registry.errors import IllegalTransition, InvalidValue, NotFound, RegistryError
from registry.models.catalog import NEXT, ModelRecord
from tests.admin.registration.test_registrar import FAKE, folder
from tests.engine.hub_server import hub_server
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.test_convert import SHAPE


def add(context: OperatorContext, source: str, name: str = "m", revision: str = "") -> ModelRecord:
    begun = models.begin_registration(context, name, source, revision=revision)
    (model,) = registrar.run(context, [begun], command=FAKE)
    return model


def downloads(context: OperatorContext) -> list[str]:
    return sorted(path.name for path in (context.data_dir / "downloads").glob("*"))


def cli(context: OperatorContext, *arguments: str) -> int:
    return main([*arguments, "--data-dir", str(context.data_dir)])


def test_a_hub_model_keeps_what_was_asked_for_and_the_commit(context: OperatorContext) -> None:
    seen: list[Progress] = []
    begun = models.begin_registration(context, "m", "acme/good", revision="v1")
    (model,) = registrar.run(context, [begun], seen.append, FAKE)
    assert (model.state, model.source, model.requested_revision) == ("ready", "acme/good", "v1")
    assert model.source_commit == "2" * 40
    told = [progress.preflight for progress in seen if progress.preflight]
    assert [event.download_bytes for event in told] == [50]
    assert downloads(context) == []


def test_cancel_ends_it_wherever_it_runs(
    context: OperatorContext, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = models.begin_registration(context, "m", "acme/slow")
    running = threading.Event()

    def show(progress: Progress) -> None:
        if progress.phase == "download":
            running.set()

    def stop() -> None:
        running.wait(30)
        assert downloads(context)
        assert cli(context, "models", "cancel", "m") == 0

    canceller = threading.Thread(target=stop)
    canceller.start()
    (model,) = registrar.run(context, [begun], show, FAKE)
    canceller.join()
    assert (model.state, model.reason_code) == ("failed", "cancelled")
    assert "cancelled by cli:" in model.reason
    assert "cancelled the registration" in capsys.readouterr().out
    assert downloads(context) == []
    with locks.hold(context.data_dir / locks.PACKS_LOCK):
        pass  # nobody writes packs
    with pytest.raises(IllegalTransition, match="is failed: there is no registration"):
        models.cancel_registration(context, "m")
    with pytest.raises(NotFound):
        models.cancel_registration(context, "none")


def test_a_registration_nobody_works_for_any_more_can_be_cancelled(
    context: OperatorContext,
) -> None:
    begun = models.begin_registration(context, "m", "acme/slow")
    assert models.cancel_registration(context, "m").registration == begun.registration
    assert service_models.show_model(context, "m").reason_code == "cancelled"


def test_a_retry_goes_on_with_the_commit_and_what_was_fetched(
    context: OperatorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = add(context, "acme/flaky", revision="main")
    assert (model.state, model.reason_code) == ("failed", "network")
    assert "models retry m" in model.reason
    assert downloads(context) == [f"acme--flaky@{'4' * 40}"]
    service_models.list_models(context)
    begun = models.retry_registration(context, "m")
    assert register_process.source_name(begun) == f"acme/flaky@{'4' * 40}"
    (model,) = registrar.run(context, [begun], command=FAKE)
    assert (model.state, model.requested_revision) == ("ready", "main")
    assert downloads(context) == []
    with pytest.raises(IllegalTransition, match="only a failed registration"):
        models.retry_registration(context, "m")


def test_what_is_kept_is_kept_for_a_time(context: OperatorContext, tmp_path: Path) -> None:
    model = add(context, "acme/flaky")
    (name,) = downloads(context)
    (context.data_dir / "downloads" / "strange").mkdir()
    service_models.list_models(context)
    assert downloads(context) == [name]
    later = OperatorContext(
        context.engine,
        context.data_dir,
        "test",
        clock=lambda: (model.heartbeat_at or 0.0) + context.settings.download_keep_s + 1,
    )
    service_models.list_models(later)
    assert downloads(context) == []
    add(context, "acme/flaky", "other")
    assert downloads(context) == [name]
    service_models.remove_model(context, "other")
    assert downloads(context) == [name]  # m may go on with it too
    service_models.remove_model(context, "m")
    assert downloads(context) == []


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(context: OperatorContext) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        for owner in (process.pid, os.getpid()):
            (context.packs_dir / f".tmp-{owner}-abc").mkdir(parents=True)
        service_models.list_models(context)
        assert len(list(context.packs_dir.iterdir())) == 2
        process.kill()
    service_models.list_models(context)
    assert [path.name for path in context.packs_dir.iterdir()] == [f".tmp-{os.getpid()}-abc"]


def test_update_and_rollback(context: OperatorContext, capsys: pytest.CaptureFixture[str]) -> None:
    first = add(context, "acme/good", revision="v1")
    begun = models.begin_update(context, "m", revision="main")
    assert begun.name == f"m{NEXT}"
    (second,) = registrar.run(context, [begun], command=FAKE)
    assert (second.name, second.state, second.source_commit) == ("m", "ready", "4" * 40)
    assert second.registration == begun.registration
    assert service_models.sweep_packs(context.data_dir, context.engine) == []
    assert cli(context, "models", "rollback", "m") == 0
    assert service_models.show_model(context, "m").revision == first.revision
    assert cli(context, "models", "rollback", "m") == 1
    assert cli(context, "models", "rollback", "m", "--to", "4444") == 0
    assert cli(context, "models", "revisions", "m", "--json") == 0
    shown = capsys.readouterr().out
    rows = json.loads(shown[shown.index("[") :])
    assert [(row["revision"], row["current"]) for row in rows] == [
        (first.revision, False),
        (second.revision, True),
    ]
    # One that lost its pack is not switched to.
    (context.packs_dir / first.pack / "weights.bin").unlink()
    (context.packs_dir / first.pack).rmdir()
    with pytest.raises(RegistryError, match="is missing"):
        service_models.roll_back(context, "m")
    assert service_models.show_model(context, "m").revision == second.revision
    # Nor one of a format that workers no longer read.
    (context.packs_dir / first.pack).mkdir()
    index = msgspec.msgpack.encode({"version": PACK_VERSION - 1}) + bytes(8)
    (context.packs_dir / first.pack / registration_files.PACK_INDEX).write_bytes(index)
    with pytest.raises(RegistryError, match="earlier release"):
        service_models.roll_back(context, "m")
    assert service_models.show_model(context, "m").revision == second.revision


def test_an_update_of_a_hub_model_stays_with_the_hub(
    context: OperatorContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(context, "acme/good", revision="v1")
    (tmp_path / "acme" / "good").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    begun = models.begin_update(context, "m")
    assert (begun.source, begun.requested_revision) == ("acme/good", "v1")


def test_sources_that_are_no_names_of_folders(context: OperatorContext, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff")
    odd.mkdir()
    for source in ("~nobody-is-called-so/x", "a" * 5000, str(odd)):
        with pytest.raises(InvalidValue):
            models.begin_registration(context, "m", source)


def test_a_reason_is_one_line_that_a_terminal_only_shows(
    context: OperatorContext, tmp_path: Path
) -> None:
    said = "holds a \x1b[2JEvil\n  and\u202emore"
    model = add(context, folder(tmp_path, "bad", refuse=said))
    assert model.reason == "holds a [2JEvil and more"


def test_an_update_that_fails_or_is_cancelled_leaves_the_model_serving(
    context: OperatorContext, tmp_path: Path
) -> None:
    good = folder(tmp_path, "good")
    served = add(context, good)
    bad = folder(tmp_path, "bad", refuse="weights.bin is a pickle")
    (failed,) = registrar.run(context, [models.begin_update(context, "m", bad)], command=FAKE)
    assert (failed.name, failed.state) == (f"m{NEXT}", "failed")
    models.begin_update(context, "m", "acme/slow")
    assert models.cancel_registration(context, "m").name == f"m{NEXT}"
    now = service_models.show_model(context, "m")
    assert (now.state, now.revision) == ("ready", served.revision)
    (tmp_path / "bad" / "refuse").unlink()
    again = models.begin_update(context, "m")
    assert again.source == good  # as it was, whatever failed in between
    with pytest.raises(InvalidValue, match="--revision"):
        models.begin_update(context, "m", good, revision="v1")
    with pytest.raises(InvalidValue, match="reserved"):
        models.begin_registration(context, f"m{NEXT}", good)


def test_the_token_is_on_no_command_line(context: OperatorContext, tmp_path: Path) -> None:
    settings = Settings(
        data_dir=str(context.data_dir), hub_token="hf_secret", hub_endpoint="http://mirror"
    )
    begun = models.begin_registration(context, "m", "acme/good")
    arguments = register_process.arguments(settings, context.data_dir, "auto", [begun])
    assert "hf_secret" not in " ".join(arguments)
    environment = register_process.environment(settings, arguments)
    assert (environment["HF_TOKEN"], environment["HF_ENDPOINT"]) == ("hf_secret", "http://mirror")


def test_a_folder_is_registered_without_any_secret(
    context: OperatorContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What parses strangers' files is a process without them; only a fetch needs the hub's."""
    for name in ("POLYHOST_DATABASE_URL", "PGPASSWORD", "HF_TOKEN", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "hunter2")
    told = tmp_path / "told"
    program = f"import os, pathlib; pathlib.Path({str(told)!r}).write_text(str(dict(os.environ)))"
    settings = Settings(data_dir=str(context.data_dir), hub_token="hunter2")
    command = (sys.executable, "-c", program, "--source", "/somewhere")
    with (
        tempfile.TemporaryFile() as errors,
        register_process.started(command, settings, errors, errors.fileno()),
    ):
        pass
    assert "PATH" in told.read_text()
    assert "hunter2" not in told.read_text()


def polyhost(context: OperatorContext, url: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments, "--data-dir", str(context.data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "POLYHOST_HUB_ENDPOINT": url, "NO_PROXY": "127.0.0.1"},
    )


def test_the_command_line_killed_midway_and_tried_again(
    context: OperatorContext, tmp_path: Path
) -> None:
    """The real processes: a download over HTTP, kill -9, a retry that fetches only the rest."""
    source = hf_folder(tmp_path / "tiny", LlamaConfig(**{**SHAPE, "hidden_size": 64}))
    name = "model.safetensors"
    with hub_server() as hub:
        hub.add("acme/tiny", source)
        hub.faults.hold = {name: threading.Event()}
        options = ("models", "add", "m", "--source", "acme/tiny", "--dtype", "float32")
        with polyhost(context, hub.url, *options) as first:
            while not hub.sent[name]:
                assert first.poll() is None
                time.sleep(0.01)
            first.send_signal(signal.SIGKILL)
        fetched = hub.sent[name]
        (kept,) = (context.data_dir / "downloads").iterdir()
        while (part := kept / f"{name}.part").stat().st_size < fetched:
            time.sleep(0.01)
        with locks.hold(context.data_dir / locks.PACKS_LOCK, timeout_s=30):
            pass  # the orphan has ended by itself
        hub.faults.hold[name].set()
        model = service_models.show_model(context, "m")
        assert (model.state, model.reason_code) == ("failed", "interrupted")
        assert part.exists()
        hub.sent.clear()
        with polyhost(context, hub.url, "models", "retry", "m") as second:
            output, _ = second.communicate()
    assert second.returncode == 0, output
    assert "m is ready (llama, float32" in output
    assert "m: probe" in output
    assert "to download" in output
    assert hub.sent[name] == len(hub.repos["acme/tiny"][name]) - fetched
    assert downloads(context) == []
