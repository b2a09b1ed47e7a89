"""The whole gateway process around a scripted worker: up, ready, restarts, down in order."""

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from admin.context.data_folder import bind_database
from gateway.ipc import machine
from gateway.server.startup_banner import startup_banner
from gateway.server.supervisor import serve
from gateway.server.worker_slots import NoSuchWorkers
from gateway.settings.settings import Settings
from registry.locks import SERVER_LOCK, LockBusy, is_held
from registry.schema import upgrade
from registry.session import make_engine
from tests.gateway.ledger.test_ledger import killed_with_open, open_in, postings_in

WORKER = (sys.executable, "-m", "tests.gateway.scripted_worker_process", "--config")


def status_of(url: str) -> int:
    """The HTTP status of a GET; 0 where nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


async def until(predicate: Callable[[], bool]) -> None:
    for _ in range(4000):
        if await asyncio.to_thread(predicate):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that")


def children() -> list[int]:
    """Worker processes of this process."""
    found = []
    for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        with suppress(OSError):
            if b"scripted_worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def workers() -> dict[str, int]:
    """Their process ids by name."""
    found = {}
    for pid in children():
        with suppress(OSError):
            config = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2]
            found[json.loads(config)["worker_id"]] = pid
    return found


@asynccontextmanager
async def server(settings: Settings) -> AsyncIterator["asyncio.Task[None]"]:
    """`serve` as a task, stopped by a signal at the end if it still runs."""
    # Until `serve` has set its handlers, the signal must not end the tests.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task = asyncio.create_task(serve(settings, WORKER))
    try:
        yield task
    finally:
        while not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait([task], timeout=1.0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        await task


def settings_in(folder: Path, **more: object) -> Settings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values: dict[str, object] = {"port": port, "data_dir": str(folder), "shutdown_notice_s": 0.0}
    return Settings(**{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def quiet_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` sets logging up for a process; here the tests' own stays."""
    monkeypatch.setattr("gateway.server.supervisor.set_up_logging", lambda: None)


@pytest.mark.usefixtures("quiet_logging")
async def test_up_ready_killed_worker_and_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_in(tmp_path, shutdown_notice_s=0.3)
    exports = tmp_path / "exports"
    exports.mkdir()
    exports.chmod(0o755)  # by an earlier release
    url = f"http://127.0.0.1:{settings.port}"
    async with server(settings) as task:
        await until(lambda: status_of(f"{url}/health/ready") == 200)
        await until(lambda: f"{url}/v1" in capsys.readouterr().out)
        assert is_held(tmp_path / SERVER_LOCK)
        assert not exports.stat().st_mode & 0o077
        (first,) = children()
        os.kill(first, signal.SIGKILL)
        await until(lambda: children() not in ([], [first]))
        await until(lambda: status_of(f"{url}/health/ready") == 200)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: status_of(f"{url}/health/ready") != 200)
        await task
    assert children() == []
    assert not is_held(tmp_path / SERVER_LOCK)
    assert not list(machine.SHM_DIR.glob(f"*{machine.data_dir_id(tmp_path)}*"))


@pytest.mark.usefixtures("quiet_logging")
async def test_one_server_a_data_folder_and_one_a_port(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    url = f"http://127.0.0.1:{settings.port}"
    async with server(settings):
        await until(lambda: status_of(f"{url}/health/live") == 200)
        with pytest.raises(LockBusy):
            await serve(settings, WORKER)
        taken = settings_in(tmp_path / "other", port=settings.port)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{settings.port}"):
            await serve(taken, WORKER)


@pytest.mark.usefixtures("quiet_logging")
async def test_a_worker_that_cannot_be_started_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="does-not-exist"):
        await serve(settings_in(tmp_path), ("/does-not-exist", "--config"))
    assert not is_held(tmp_path / SERVER_LOCK)


@pytest.mark.usefixtures("quiet_logging")
async def test_requests_of_a_gateway_that_is_no_more_are_closed(tmp_path: Path) -> None:
    """It was one of several; now there is one."""
    settings = settings_in(tmp_path, ledger_recovery_wait_s=0.0)
    upgrade(settings.registry_url)
    bind_database(settings)
    engine = make_engine(settings.registry_url)
    await killed_with_open(engine, "lost", gateway_id="gateway-3")
    async with server(settings):
        await until(lambda: set(postings_in(engine)) == {"lost"})
    assert open_in(engine) == []
    assert not list((tmp_path / "journal/gateway-3").glob("*.journal"))
    engine.dispose()


def test_the_start_block_says_only_what_there_is(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    block = startup_banner("0.0.0.0", 81, settings, [], None)
    assert "http://127.0.0.1:81/v1" in block
    assert "none yet" in block
    assert "curl" not in block
    assert "m, n" in startup_banner("::1", 81, settings, ["m", "n"], None)
    assert "http://[::1]:81" in startup_banner("::1", 81, settings, [], None)


def test_memory_is_the_container_s_where_that_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    assert machine.free_memory_bytes(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert machine.free_memory_bytes(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("105\n")
    assert machine.free_memory_bytes(meminfo, tmp_path) == 100
    assert machine.free_shm_bytes(tmp_path / "missing") == 0
    assert machine.free_shm_bytes(tmp_path) > 0


def test_sockets_lie_where_their_paths_fit(tmp_path: Path) -> None:
    short = tmp_path / "d"
    assert machine.socket_path(short, "w").parent == short / "run"
    long = tmp_path / ("x" * 120)
    path = machine.socket_path(long, "w")
    assert len(str(path)) < 108
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.rmdir()


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_several_workers_start_serve_and_end(tmp_path: Path, num_processes: int) -> None:
    """Each has a process, a socket and a home of its own; one that dies comes again alone."""
    settings = settings_in(tmp_path, num_workers=3, gateway_processes=num_processes)
    async with server(settings):
        url = f"http://127.0.0.1:{settings.port}/health/ready"
        await until(lambda: status_of(url) == 200 and len(workers()) == 3)
        before = workers()
        os.kill(before["worker-1"], signal.SIGKILL)
        await until(lambda: workers().get("worker-1", 0) not in (0, before["worker-1"]))
        after = workers()
        assert {name for name in after if after[name] == before[name]} == {"worker-0", "worker-2"}
        await until(lambda: status_of(url) == 200)  # of several gateways one may just come
    assert not workers()


async def test_devices_that_are_not_there_end_the_start_with_one_line(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, num_workers=2, device="cuda:0")
    with pytest.raises(NoSuchWorkers, match="2 workers are to use cuda:0"):
        await serve(settings, WORKER)
