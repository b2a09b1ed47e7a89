"""bench.gpu without a GPU: every part's plumbing on the fake device, resuming, tables, packages."""

import gc
import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_checks, gpu_models, gpu_parity, gpu_part, gpu_swap
from bench.gpu_parts import PARTS, run_part
from bench.gpu_rig import Settings, rig
from engine.errors import CaptureFailed
from engine.gpu.graphs import StepGraphs
from engine.pack import BLOB_NAME, read_index
from engine.packs.weights import verify_blob
from tests.engine.fake_device import FakeDevice

ROOT = Path(__file__).resolve().parents[2]
# Of the packages that Polyhost installs, those that a common CUDA image has not.
BARE_IMAGE_LACKS = (
    "alembic argon2 cachetools httptools llguidance msgspec redis sqlalchemy starlette uvicorn zmq"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(tmp_path_factory.mktemp("gpu"), dry=True)


@pytest.mark.parametrize("name", list(PARTS))
def test_every_part_runs_on_the_fake_device(name: str, settings: Settings) -> None:
    figures = run_part(name, settings)
    assert figures["wall_s"] > 0
    assert json.loads(json.dumps(figures)) == figures
    if name == "parity":
        assert figures["goals"]["wrong tokens"]["met"]
        assert figures["llama"]["fused"]
        assert not figures["gemma3_text"]["fused"]
        assert figures["qwen3"]["same"] > gpu_parity.NEW_TOKENS
    elif name.startswith("decode"):
        assert figures["graphs"]["graph_replays"] > 0
        assert figures["batch 1"]["tokens_per_s"] > 0
    elif name == "many models":
        assert figures["answered"] == 6
    elif name == "checks":
        assert all(goal["met"] for goal in figures["goals"].values()), figures


def test_a_check_that_fails_is_a_goal_missed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that pins nothing and records nothing, and a kernel that moves nothing."""

    def refuse(self: FakeDevice, *args: Any) -> None:
        raise CaptureFailed("not here") if len(args) == 1 else OSError("not here")

    monkeypatch.setattr(FakeDevice, "pin", refuse)
    monkeypatch.setattr(FakeDevice, "capture", refuse)
    monkeypatch.setattr(gpu_checks, "PATIENCE_S", 0.0)
    monkeypatch.setattr("bench.gpu_rig.page_copy_ref", lambda arena, moves: None)
    figures = run_part("checks", settings)
    assert figures["refused_with"] == "not here"
    missed = {name for name, goal in figures["goals"].items() if not goal["met"]}
    assert len(missed) == len(figures["goals"]) - 2


def test_an_arena_goes_with_its_rig(settings: Settings) -> None:
    """The next one of the process takes what is free: on a GPU nothing would be."""
    pack_dir, index = gpu_models.make_pack(gpu_models.SMALL, settings.work_dir, True)
    with rig(settings) as made:
        made.host({"m": pack_dir})
        made.load("m")
        made.steady_decode(1, index.vocab_size)
        arena = weakref.ref(made.opened.backend.arena)
    gc.collect()
    assert arena() is None
    assert made.settings is settings


def test_a_swap_without_pins_or_graphs_is_measured_all_the_same(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeDevice, address: int, num_bytes: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(FakeDevice, "pin", refuse)
    monkeypatch.setattr(gpu_swap, "STILL_S", 0.0)
    monkeypatch.setattr(gpu_swap.await_pinned, "__defaults__", (0.05,))
    monkeypatch.setattr(StepGraphs, "run", lambda self, key, work: work())
    figures = run_part("swap 8B", settings)
    assert figures["pinned_share"] == 0
    assert figures["warm"]["seconds"] > 0
    assert figures["to_graph_speed_s"] == math.inf


def test_both_lists_of_parts_are_one() -> None:
    assert sorted(gpu.MINUTES) == sorted(PARTS)
    assert all(60 * minutes <= gpu.PART_LIMIT_S for minutes in gpu.MINUTES.values())


def test_a_wrong_token_is_no_tie() -> None:
    """What the parity part compares with has to be able to say no."""

    class Reference:
        def parameters(self) -> Any:
            return iter([torch.zeros(1)])

        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(1, input_ids.shape[1], 8)
            logits[..., 3], logits[..., 4], logits[..., 5] = 10.0, 9.9, 5.0
            return type("Out", (), {"logits": logits})()

    wanted = {"same": 2, "ties": 1, "wrong": 0}
    assert gpu_parity.compare(Reference(), [1], [3, 4, 3]) == wanted
    assert gpu_parity.compare(Reference(), [1], [3, 5, 3]) == {"same": 1, "ties": 0, "wrong": 1}


def test_packs_are_made_once_whole_and_not_empty(settings: Settings) -> None:
    pack_dir, index = gpu_models.make_pack("Qwen/Qwen3-1.7B", settings.work_dir, True)
    verify_blob(pack_dir, index)
    assert gpu_models.make_pack("Qwen/Qwen3-1.7B", settings.work_dir, True)[0] == pack_dir
    assert any((pack_dir / BLOB_NAME).read_bytes())
    others = gpu_models.twins(pack_dir, 2)
    revisions = {read_index(other).revision for other in (pack_dir, *others)}
    assert len(revisions) == 3
    for other in others:
        verify_blob(other, read_index(other))


def test_shapes_are_what_they_say() -> None:
    """Parameters of the shapes, embeddings of the larger two apart from their heads or not."""
    shape = gpu_models.shape_of("Qwen/Qwen3-1.7B", dry=False)
    assert (shape["hidden_size"], shape["num_hidden_layers"]) == (2048, 28)
    assert gpu_models.shape_of("meta-llama/Llama-3.1-8B", dry=True)["hidden_size"] == 128


class Machine:
    """Runs parts as told, on a clock."""

    def __init__(self, fails: Sequence[str] = (), seconds: float = 60.0, status: int = 0) -> None:
        self.ran: list[str] = []
        self.now_s = 0.0
        self._fails = fails
        self._seconds = seconds
        self._status = status

    def __call__(self, names: Sequence[str], file: Path, seconds: float) -> int:
        assert seconds <= gpu.PART_LIMIT_S
        self.now_s += self._seconds
        if self._status:
            return self._status
        for name in names:
            self.ran.append(name)
            row: dict[str, Any] = {"part": name, "device": "H200"}
            if name in self._fails:
                row["failure"] = "no"
            else:
                goals = {"fast": {"reached": 1.0, "wanted": 2.0, "met": False}}
                row["figures"] = {"a": 1.25, "b": {"c": [1, 2.0]}, "goals": goals}
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
        return 0


def go(machine: Machine, out: Path, wanted: Sequence[str], seconds: float = 1e6) -> int:
    def save(results: gpu.Results) -> None:
        gpu.write(out, results)

    return gpu.run(wanted, gpu.read(out), machine, save, seconds, lambda: machine.now_s)


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    wanted = ["device", "parity", "decode 8B"]
    first = Machine(seconds=130)
    assert go(first, tmp_path, wanted, seconds=180) == gpu.LEFT
    assert first.ran == ["device"]
    second = Machine(fails=["parity"])
    assert go(second, tmp_path, wanted) == 1
    assert second.ran == ["parity", "decode 8B"]
    third = Machine()
    assert go(third, tmp_path, wanted) == 0
    assert third.ran == ["parity"]
    page = (tmp_path / "gpu.md").read_text()
    assert "| device: fast | 1 | 2.0 | **missed** |" in page
    assert "| b, c | 1, 2 |" in page


def test_what_was_reached_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(Machine(fails=["device"]), tmp_path, ["parity", "device"])
    assert capsys.readouterr().out == "parity: done in 0 s; fast: 1 (2.0)\ndevice: no\n"


def test_what_has_failed_comes_last(tmp_path: Path) -> None:
    """It may take its eight minutes again, and the others would never have their turn."""
    wanted = ["device", "parity", "decode 8B"]
    assert go(Machine(fails=["device"]), tmp_path, wanted[:1]) == 1
    again = Machine()
    assert go(again, tmp_path, wanted) == 0
    assert again.ran == ["parity", "decode 8B", "device"]


def test_what_the_dead_left_in_shared_memory_goes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    dead, alive = (f"{gpu.SHM_PREFIX}{pid}-ab.pack" for pid in (child.pid, os.getpid()))
    for name in (dead, alive, "another"):
        (tmp_path / name).touch()
    gpu.clear_shared(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive, "another"])


def test_a_part_that_leaves_nothing_is_a_failure(tmp_path: Path) -> None:
    assert go(Machine(status=124), tmp_path, ["device"]) == 1
    assert gpu.read(tmp_path)["device"]["failure"] == "ended with 124"


def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    assert go(Machine(status=gpu.NO_GPU), tmp_path, ["device"]) == gpu.NO_GPU
    assert not list(tmp_path.iterdir())
    arguments = ["device", "--results", str(tmp_path / "r"), "--work-dir", str(tmp_path)]
    assert gpu_part.main(arguments) == gpu.NO_GPU
    assert not list(tmp_path.iterdir())


def test_what_a_part_raises_is_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, settings: Settings) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(gpu_part, "run_part", fail)
    file = tmp_path / "r"
    arguments = ["device", "--results", str(file), "--work-dir", str(tmp_path), "--dry-run"]
    assert gpu_part.main(arguments) == 1
    assert gpu.read_lines(file)["device"]["failure"] == "ValueError: broken"


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bare image lacks is named, and comes from wheels or not at all."""
    text = "there==1  # json\n\nmissing==2  # no_such_module\n"
    assert gpu.missing_packages(text) == ["missing==2"]
    requirements = tmp_path / "requirements"
    requirements.write_text(text)
    monkeypatch.setattr(gpu, "REQUIREMENTS", requirements)
    with pytest.raises(RuntimeError, match="missing: missing==2; fill a folder"):
        gpu.bring_packages(None, tmp_path)
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    assert gpu.bring_packages(tmp_path, tmp_path / "to") == tmp_path / "to"
    assert "--no-index" in commands[0]
    assert commands[0][-1] == "missing==2"
    requirements.write_text("there==1  # json\n")
    assert gpu.bring_packages(None, tmp_path) is None


def test_a_bare_image_needs_no_more_than_the_packages_named() -> None:
    """Nothing can be fetched there: what else is imported would be found missing too late."""
    lines = (ROOT / "bench" / "requirements-gpu.txt").read_text().splitlines()
    brought = {line.partition("#")[2].strip() for line in lines}
    code = (
        "import sys\n"
        f"for name in {sorted(set(BARE_IMAGE_LACKS.split()) - brought)}: sys.modules[name] = None\n"
        "import bench.gpu_part, bench.kernels\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_the_packages_named_are_those_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    for line in (ROOT / "bench" / "requirements-gpu.txt").read_text().splitlines():
        assert line.partition("#")[0].strip() in constraints


def test_a_whole_name_is_that_part_alone() -> None:
    assert gpu.named("decode 8B", "decode 8B")
    assert not gpu.named("decode 8B", "decode 8B and more")
    assert gpu.named("decode", "decode 0.5B")
    assert not gpu.named("swap", "decode 0.5B")
