"""`polyhost serve`: which options become which settings, and the worker that starts before all."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from admin.cli import server as command
from admin.cli.main import main
from gateway.server import supervisor
from gateway.server.child_process import EarlyWorker
from gateway.settings.settings import Settings
from registry.errors import RegistryError

WAITS = (sys.executable, "-c", "import sys\nsys.stdin.read()", "--config")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of every server started; none of them really starts."""
    monkeypatch.chdir(tmp_path)
    started: list[Settings] = []

    async def serve(settings: Settings, worker_command: Sequence[str], early: EarlyWorker) -> None:
        started.append(settings)

    monkeypatch.setattr(supervisor, "serve", serve)
    monkeypatch.setattr(command, "WORKER_COMMAND", WAITS)
    return started


def test_options_override_settings(served: list[Settings], tmp_path: Path) -> None:
    options = ["--host", "0.0.0.0", "--port", "0", "--device-budget", "1.5GiB", "--demo"]
    more = ["--host-tier", "0", "--threads", "2", "--data-dir", str(tmp_path / "d")]
    assert main(["serve", *options, *more]) == 0
    (settings,) = served
    assert settings == Settings(
        host="0.0.0.0",
        port=0,
        device_budget_bytes=3 << 29,
        demo=True,
        host_tier_bytes=0,
        num_threads=2,
        data_dir=str(tmp_path / "d"),
    )


def test_what_a_server_and_its_children_make_is_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "by the worker"
    program = f"import pathlib; pathlib.Path({str(made)!r}).touch()"

    async def serve(settings: Settings, worker_command: Sequence[str], early: EarlyWorker) -> None:
        settings.data_path.mkdir()
        await early.process.wait()

    monkeypatch.setattr(supervisor, "serve", serve)
    monkeypatch.setattr(command, "WORKER_COMMAND", (sys.executable, "-c", program))
    mask = os.umask(0o022)
    try:
        assert main(["serve", "--data-dir", str(tmp_path / "d")]) == 0
    finally:
        assert os.umask(mask) == 0o022
    assert not (tmp_path / "d").stat().st_mode & 0o077
    assert not made.stat().st_mode & 0o077


def test_what_is_not_given_is_left_to_the_file(served: list[Settings], tmp_path: Path) -> None:
    (tmp_path / "polyhost.toml").write_text("port = 9\ndemo = true\n")
    assert main(["serve"]) == 0
    assert (served[0].port, served[0].demo) == (9, True)


def test_a_wrong_setting_is_one_line(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "port" in capsys.readouterr().err
    assert served == []


def test_a_server_that_cannot_begin_leaves_no_worker(
    served: list[Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers: list[int] = []

    async def serve(settings: Settings, worker_command: Sequence[str], early: EarlyWorker) -> None:
        assert worker_command == WAITS
        os.kill(early.process.pid, 0)
        workers.append(early.process.pid)
        raise RegistryError("another server has this folder")

    monkeypatch.setattr(supervisor, "serve", serve)
    assert main(["serve"]) == 1
    assert "another server has this folder" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(workers[0], 0)


def test_the_worker_hears_of_its_threads_before_it_imports(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads them when torch is imported."""
    told = tmp_path / "told"
    program = (
        "import os, pathlib, sys\n"
        "names = ('OMP_NUM_THREADS', 'OMP_WAIT_POLICY', 'POLYHOST_REDIS_URL')\n"
        f"pathlib.Path({str(told)!r}).write_text(str([os.environ.get(name) for name in names]))\n"
    )

    async def serve(settings: Settings, worker_command: Sequence[str], early: EarlyWorker) -> None:
        await early.process.wait()

    monkeypatch.setattr(supervisor, "serve", serve)
    monkeypatch.setattr(command, "WORKER_COMMAND", (sys.executable, "-c", program))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("POLYHOST_REDIS_URL", "redis://user:secret@127.0.0.1:1")
    assert main(["serve", "--threads", "3"]) == 0
    assert told.read_text() == str(["3", "PASSIVE", None])


SCENE = """
import os, signal, sys
from admin.cli import server as serve
from admin.cli.main import main
from gateway.server.child_process import start_early

async def start(command, environment):
    print("gateway.server.supervisor" in sys.modules, flush=True)
    worker = await start_early(command, environment)
    os.kill(os.getpid(), signal.SIGINT)  # amid the imports, which are next
    return worker

serve.WORKER_COMMAND = (sys.executable, "-c", "import sys; sys.stdin.read()", "--config")
serve.start_early = start
sys.exit(main(["serve", "--data-dir", sys.argv[1]]))
"""


def test_the_worker_starts_before_the_imports_and_an_interrupt_amid_them_changes_nothing(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCENE, str(tmp_path / "d")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.stdout == "False\n"
    assert (done.returncode, done.stderr) == (1, "polyhost: interrupted\n")
    assert not list((tmp_path / "d").glob("*.db*"))
