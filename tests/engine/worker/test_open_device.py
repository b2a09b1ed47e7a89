"""Which device a worker takes, and what it says where it cannot: one line, exit code 1."""

import json
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine.backend import cuda_device
from engine.backend.cpu import CpuBackend
from engine.config import EngineConfig, WorkerConfig
from engine.errors import DeviceUnusable
from engine.worker import main as worker
from engine.worker import open_device as choose
from engine.worker.main import EXIT_FAILED
from engine.worker.open_device import budget_of, on_gpu, open_cpu, open_device
from engine.worker.step_limits import for_cpu, for_gpu, in_words

GIB = 1 << 30


def config(device: str = "cpu", **settings: Any) -> WorkerConfig:
    engine = EngineConfig(arena_bytes=1 << 20, shm_prefix="t")
    return WorkerConfig(worker_id="w", endpoint="ipc://x", engine=engine, device=device, **settings)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_gpu_the_cpu_is_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "gpu_names", lambda: [])
    opened = open_device(config(device))
    assert isinstance(opened.backend, CpuBackend)
    assert opened.config == config().engine
    opened.backend.close()


def test_auto_never_falls_back_from_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise DeviceUnusable("too old")

    monkeypatch.setattr(choose, "gpu_names", lambda: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(choose, "CudaDevice", refuse)
    with pytest.raises(DeviceUnusable, match="too old"):
        open_device(config("auto"))


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "tpu:0", ""])
def test_other_names_are_refused(device: str) -> None:
    with pytest.raises(DeviceUnusable, match="unknown device"):
        open_device(config(device))


def fake_driver(monkeypatch: pytest.MonkeyPatch, **change: Any) -> None:
    """torch with CUDA and one H200, but for what `change` says."""

    def tensor(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(add_=lambda _: SimpleNamespace(item=lambda: 1.0))

    behaviour: dict[str, Any] = {
        "init": lambda: None,
        "device_count": lambda: 1,
        "get_device_capability": lambda index: (9, 0),
        "get_device_name": lambda index: "NVIDIA H200",
        **change,
    }
    monkeypatch.setattr(torch.version, "cuda", behaviour.pop("version", "13.0"))
    monkeypatch.setattr(torch, "zeros", behaviour.pop("zeros", tensor))
    monkeypatch.setattr(cuda_device, "HAS_TRITON", behaviour.pop("triton", True))
    kernel = behaviour.pop("kernel", lambda index: None)
    monkeypatch.setattr(cuda_device, "try_kernel", kernel)
    for name, function in behaviour.items():
        monkeypatch.setattr(torch.cuda, name, function)


def raising(text: str) -> Any:
    def raise_(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(text)

    return raise_


NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed "
    "a driver from http://www.nvidia.com/Download/index.aspx"
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version"
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": None}, "this build of torch has no CUDA"),
        ({"triton": False}, "triton is not installed"),
        ({"init": raising(NO_DRIVER)}, "there is no NVIDIA driver: install one"),
        ({"init": raising(OLD_DRIVER)}, r"driver \(11040\) is too old for CUDA 13.0"),
        ({"init": raising("No CUDA GPUs are available")}, "shows no GPU to this process"),
        ({"init": raising("unknown error\nand more")}, "cannot be used: unknown error$"),
        ({"device_count": lambda: 0}, "there is no GPU 0: the driver shows 0"),
        ({"get_device_capability": lambda index: (7, 0)}, r"compute capability 7.0; at least 8.0"),
        (
            {"zeros": raising("CUDA error: no kernel image is available for execution")},
            "was not built for it",
        ),
        ({"zeros": raising("CUDA error: out of memory\nCUDA kernel errors")}, "out of memory"),
        (
            {"kernel": raising("Failed to find C compiler. Please specify\nand more")},
            r"compile a kernel for NVIDIA H200: Failed to find C compiler\. Please specify \(it",
        ),
        ({"kernel": raising("")}, "cannot compile a kernel for NVIDIA H200: RuntimeError"),
    ],
)
def test_each_reason_is_one_line(
    change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(monkeypatch, **change)
    with pytest.raises(DeviceUnusable, match=said) as refused:
        cuda_device.check(0)
    assert "\n" not in str(refused.value)


def test_a_usable_gpu_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch)
    cuda_device.check(0)
    with pytest.raises(DeviceUnusable, match="no GPU 1"):
        cuda_device.check(1)


def test_memory_is_divided() -> None:
    budget = budget_of(config(), 138 * GIB, 139 * GIB)
    assert budget.arena + budget.reserve + budget.graphs == 138 * GIB
    assert budget.arena > 0.9 * 138 * GIB
    asked = config(device_arena_bytes=5 * GIB, device_reserve_bytes=GIB, graph_bytes=0)
    assert budget_of(asked, 8 * GIB, 8 * GIB).arena == 5 * GIB
    engine = on_gpu(asked.engine, budget)
    assert (engine.steps_ahead, engine.attention_in_place) == (1, True)
    assert (engine.arena_bytes, engine.reserve_bytes) == (budget.arena, budget.reserve)


def test_what_no_setting_says_is_chosen_by_the_device() -> None:
    """A GPU of 141 GB, one of 24, a processor; a setting that is set stays."""

    def limits(found: EngineConfig) -> tuple[int, int]:
        return found.max_num_seqs, found.max_batch_tokens

    free = msgspec.structs.replace(config().engine, max_num_seqs=0, max_batch_tokens=0)
    assert limits(for_gpu(free, budget_of(config(), 138 * GIB, 139 * GIB).reserve)) == (256, 8192)
    assert limits(for_gpu(free, budget_of(config(), 23 * GIB, 24 * GIB).reserve)) == (64, 1024)
    assert limits(for_gpu(free, budget_of(config(), 79 * GIB, 80 * GIB).reserve)) == (256, 4096)
    assert limits(for_cpu(free)) == (64, 1024)
    assert limits(open_cpu(free).config) == (64, 1024)
    few = msgspec.structs.replace(free, max_batch_tokens=32)
    assert limits(for_gpu(few, 8 * GIB)) == (32, 32), "rows are never more than tokens"
    many = msgspec.structs.replace(free, max_num_seqs=3000)
    assert limits(for_cpu(many)) == (3000, 3000)
    assert in_words(for_cpu(free)) == "64 sequences and 1,024 tokens a step"


@pytest.mark.parametrize(
    ("settings", "free"), [({}, 2 * GIB), ({"device_arena_bytes": 9 * GIB}, 8 * GIB)]
)
def test_too_little_memory_is_said_with_figures(settings: dict[str, Any], free: int) -> None:
    with pytest.raises(DeviceUnusable, match=f"{free} of {10 * GIB} bytes free") as refused:
        budget_of(config(**settings), free, 10 * GIB)
    assert "\n" not in str(refused.value)


def test_a_worker_says_it_once_and_exits_with_1(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "set_up_logging", lambda _: None)
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda _: None)
    text = {
        "worker_id": "w",
        "endpoint": "ipc://x",
        "device": "nonsense",
        "engine": {"arena_bytes": 1 << 20, "shm_prefix": "t"},
    }
    with caplog.at_level(logging.ERROR):
        assert worker.main(["--config", json.dumps(text)]) == EXIT_FAILED
    assert [record.message for record in caplog.records] == [
        "device nonsense cannot be used: "
        "unknown device 'nonsense': set device to auto, cpu, cuda:0, cuda:1, ..."
    ]
    assert not caplog.records[0].exc_info


def test_nothing_loads_a_driver_by_being_imported() -> None:
    """Nor does asking for a device where none is."""
    code = (
        "import engine.worker.main, engine.worker.open_device as c, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda.so' not in maps, maps\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
