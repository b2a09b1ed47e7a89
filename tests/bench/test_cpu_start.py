"""The bench of start-up: what it reads out of logs and import times, and its table."""

import argparse
import json
from pathlib import Path

import pytest

from bench import cpu, cpu_http, cpu_start, processes
from engine.packs.pack import BLOB_NAME

IMPORTTIME = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   _io
import time:    200000 |     200000 |     torch._C
import time:    300000 |     500000 |   torch
noise of some module
import time:     80000 |     580100 | engine.worker.main
import time:     70000 |      70000 | engine
"""


def entry(at: float, message: str) -> str:
    return json.dumps({"at": at, "level": "info", "message": message})


LOG = "\n".join(
    [
        entry(100.5, "process started name=worker-0 pid=9"),
        entry(103.0, "ready endpoint=ipc:///run/worker-0.sock device=cpu"),
        "Polyhost is ready:  http://127.0.0.1:1/v1",
        entry(104.0, "decision kind=load reason=free_pages model=bench worker=worker-0"),
        entry(104.75, "swap model=bench kind=load tier=disk bytes=1000000000 seconds=0.5000 x"),
        entry(106.0, "swap model=bench kind=evict tier=host bytes=1000000000 seconds=0.0000 x"),
        entry(107.0, "decision kind=load reason=free_pages model=bench worker=worker-0"),
        entry(107.5, "swap model=bench kind=load tier=host bytes=1000000000 seconds=0.2000 x"),
    ]
)


def test_imports_add_up_by_package() -> None:
    found = cpu_start.imports(IMPORTTIME)
    assert found["torch"] == pytest.approx(0.5)
    assert found["engine"] == pytest.approx(0.15)
    assert found["others"] == pytest.approx(0.0001)
    assert found["all"] == pytest.approx(0.6501)


def test_a_log_tells_when_what_had_happened() -> None:
    said = cpu_start.events(LOG, 100.0)
    assert said == {"worker_told": 0.5, "worker_ready": 3.0, "asked": 4.0}
    assert cpu_start.loads(LOG, 100.0, 4.0) == {
        "load": 0.5,
        "load_gb_s": pytest.approx(2.0),
        "built": pytest.approx(0.25),
        "again_load": 0.2,
        "again_gb_s": pytest.approx(5.0),
        "again_from_host_tier": 1.0,
    }
    once = LOG.rpartition("\n")[0]
    assert "again_load" not in cpu_start.loads(once, 100.0, 4.0)
    assert cpu_start.loads("", 100.0, 0.0) == {}


def test_engines_are_those_that_were_named() -> None:
    args = argparse.Namespace(
        llama_python=None, peer_python=Path("/p"), vllm_python=None, without=["ours, pack on disk"]
    )
    assert list(cpu_start.starts(Path("m"), args)) == ["ours, pack cached", "transformers serve"]


def test_the_table_leaves_blank_what_an_engine_has_not() -> None:
    done: dict[str, dict[str, object]] = {}
    for ready in (2.0, 4.0, 3.0):
        cpu.add(done, "ours", {"ready": ready, "load": 0.5, "cached_share": 1.0})
        cpu.add(done, "llama.cpp", {"ready": ready / 2})
    lines = cpu_start.table(done).splitlines()
    assert lines == [
        "| seconds | ours | llama.cpp |",
        "|---|---|---|",
        "| ready | 3.00 (2.00 to 4.00) | 1.50 (1.00 to 2.00) |",
        "| load | 0.50 (0.50 to 0.50) |  |",
    ]


def test_the_pack_is_found_where_the_server_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(processes.ServerFailed, match="0 packs"):
        cpu_start.blob_of(tmp_path / "m")
    blob = cpu_http.data_dir(tmp_path / "m") / "packs" / "abc" / BLOB_NAME
    blob.parent.mkdir(parents=True)
    blob.touch()
    assert cpu_start.blob_of(tmp_path / "m") == blob
