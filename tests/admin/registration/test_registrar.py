"""Registration as the catalog sees it, with a subprocess that speaks the engine's protocol."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from admin.context import operator_context as service
from admin.context.operator_context import OperatorContext
from admin.operations import models
from admin.operations import models as service_models
from admin.registration import registrar
from admin.registration.registrar import Progress
from registry import locks
from registry.errors import AlreadyExists, InvalidValue
from registry.models import catalog

FAKE = (sys.executable, str(Path(__file__).parent / "fake_register.py"))


def folder(tmp_path: Path, name: str, **files: str) -> str:
    path = tmp_path / name
    path.mkdir()
    for file, text in {"config.json": name, **files}.items():
        (path / file.replace("_", ".")).write_text(text)
    return str(path)


def test_ready_refused_and_several_in_one_process(context: OperatorContext, tmp_path: Path) -> None:
    good, bad = folder(tmp_path, "good"), folder(tmp_path, "bad", refuse="weights.bin is a pickle")
    begun = [
        models.begin_registration(context, name, source)
        for name, source in (("a", good), ("b", bad), ("alias", good))
    ]
    seen: list[Progress] = []
    a, b, alias = registrar.run(context, begun, seen.append, FAKE)
    assert (a.state, a.revision, a.pack, a.max_context) == (
        "ready",
        "rev-good-auto",
        "rev-good-auto",
        256,
    )
    assert (b.state, b.reason_code, b.reason) == (
        "failed",
        "pickle_weights",
        "weights.bin is a pickle",
    )
    assert alias.pack == a.pack
    assert Progress("a", "convert", 100, 100) in seen
    assert {progress.model for progress in seen} == {"a", "b", "alias"}
    assert (context.packs_dir / a.pack / "weights.bin").exists()


def test_a_crash_is_a_failure_with_its_last_words(context: OperatorContext, tmp_path: Path) -> None:
    source = folder(tmp_path, "bad", crash="Killed: out of memory")
    (model,) = registrar.run(
        context, [models.begin_registration(context, "m", source)], command=FAKE
    )
    assert (model.state, model.reason_code) == ("failed", "crashed")
    assert model.reason == "Killed: out of memory (to try again: `polyhost models retry m`)"
    log = context.data_dir / "logs" / "register.log"
    assert log.read_text() == "Killed: out of memory\n"
    for said, kept in (("no", "Killed: out of memory\n"), ("a bug", "trace of a bug\n")):
        (tmp_path / "bad" / "refuse").write_text(said)
        registrar.run(context, [models.begin_registration(context, "m", source)], command=FAKE)
        assert log.read_text() == kept


def test_a_failed_name_can_be_added_again_a_ready_one_not(
    context: OperatorContext, tmp_path: Path
) -> None:
    bad, good = folder(tmp_path, "bad", refuse="no"), folder(tmp_path, "good")
    registrar.run(context, [models.begin_registration(context, "m", bad)], command=FAKE)
    (model,) = registrar.run(context, [models.begin_registration(context, "m", good)], command=FAKE)
    assert model.state == "ready"
    with pytest.raises(AlreadyExists, match="rm m"):
        models.begin_registration(context, "m", good)


@pytest.mark.parametrize(
    ("source", "dtype", "message"),
    [
        ("a/b/c", "auto", "neither a folder"),
        ("/no/such/folder", "auto", "neither a folder"),
        ("./also/none", "auto", "neither a folder"),
        (".", "int3", "dtype"),
    ],
)
def test_requests_that_make_no_sense(
    context: OperatorContext, source: str, dtype: str, message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        models.begin_registration(context, "m", source, dtype)
    assert service_models.list_models(context, with_removed=True) == []


def test_dtypes_go_to_processes_of_their_own(context: OperatorContext, tmp_path: Path) -> None:
    source = folder(tmp_path, "good")
    begun = [
        models.begin_registration(context, dtype, source, dtype)
        for dtype in ("float32", "bfloat16")
    ]
    ended = registrar.run(context, begun, command=FAKE)
    assert {model.revision for model in ended} == {"rev-good-float32", "rev-good-bfloat16"}


def test_removing_a_model_stops_its_registration(
    context: OperatorContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar, "OWNER_POLL_S", 0.05)
    source = folder(tmp_path, "good", slow="")
    begun = models.begin_registration(context, "m", source)
    phases = threading.Event()

    def remove() -> None:
        phases.wait(20)
        service_models.remove_model(context, "m")

    remover = threading.Thread(target=remove)
    remover.start()
    (model,) = registrar.run(context, [begun], lambda progress: phases.set(), FAKE)
    remover.join()
    assert model.state == "removed"
    assert not locks.is_held(context.data_dir / locks.PACKS_LOCK)


def test_packs_are_not_swept_while_a_registration_writes(
    context: OperatorContext, tmp_path: Path
) -> None:
    source = folder(tmp_path, "good", slow="")
    begun = models.begin_registration(context, "m", source)
    swept: list[list[str]] = []

    def look(progress: Progress) -> None:
        if progress.phase == "convert" and not swept:
            (context.packs_dir / "half-written").mkdir()
            swept.append(service_models.sweep_packs(context.data_dir, context.engine))
            (tmp_path / "good" / "slow").unlink()

    (model,) = registrar.run(context, [begun], look, FAKE)
    assert model.state == "ready"
    assert swept == [[]]
    assert service_models.sweep_packs(context.data_dir, context.engine) == ["half-written"]
    assert [path.name for path in context.packs_dir.iterdir()] == [model.pack]


def test_an_interrupt_stops_the_process_and_fails_the_row(
    context: OperatorContext, tmp_path: Path
) -> None:
    begun = models.begin_registration(context, "m", folder(tmp_path, "good", slow=""))

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registrar.run(context, [begun], interrupt, FAKE)
    model = service_models.show_model(context, "m")
    assert (model.state, model.reason_code) == ("failed", "cancelled")
    assert not locks.is_held(context.data_dir / locks.PACKS_LOCK)


def test_the_next_look_finds_a_killed_registration(
    context: OperatorContext, tmp_path: Path
) -> None:
    source = folder(tmp_path, "good", slow="")
    program = (
        "import os\n"
        "from admin.operations import models\n"
        "from admin.registration import registrar\n"
        "from gateway.settings.settings import Settings\n"
        "from admin.context.operator_context import open_context\n"
        f"with open_context(Settings(data_dir={str(context.data_dir)!r}), 'x') as context:\n"
        f"    begun = models.begin_registration(context, 'm', {source!r})\n"
        f"    registrar.run(context, [begun], print, {FAKE!r})\n"
    )
    with subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert service_models.show_model(context, "m").state == "registering"
        assert service_models.show_model(context, "m").registrar_pid == process.pid
        process.kill()
    model = service_models.show_model(context, "m")
    assert (model.state, model.reason_code) == ("failed", "interrupted")
    assert models.begin_registration(context, "m", source).state == "registering"


def test_in_the_background(context: OperatorContext, tmp_path: Path) -> None:
    """The real thing: launcher, fork, `engine.registration.main` refusing an empty folder."""
    (tmp_path / "empty").mkdir()
    begun = models.begin_registration(context, "org/m", str(tmp_path / "empty"))
    registrar.run_detached(context, begun)
    with context.reading() as session:
        adopted = catalog.get_model(session, "org/m")
    assert adopted.registrar_pid != os.getpid()
    assert adopted.registrar_host == socket.gethostname()
    deadline = time.monotonic() + 120
    while service_models.show_model(context, "org/m").state == "registering":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    model = service_models.show_model(context, "org/m")
    assert model.state == "failed"
    assert model.reason_code not in ("interrupted", "crashed"), model.reason
    assert (context.data_dir / "logs" / "register-org--m.log").exists()


def test_a_dead_process_is_known_to_be_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert service.process_is_alive(socket.gethostname(), process.pid)
        process.send_signal(signal.SIGKILL)
    assert not service.process_is_alive(socket.gethostname(), process.pid)
    assert service.process_is_alive("another-machine", process.pid)
