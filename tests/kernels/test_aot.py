"""Every declared configuration compiles for every architecture, within limits, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import aot
from kernels.aot import Compiled, check_declared
from kernels.triton_api import ARCHS, Declared

ROOT = Path(__file__).resolve().parent.parent.parent


def test_all_that_is_declared_compiles_within_limits(tmp_path: Path) -> None:
    """In a process of its own: in this one kernels are interpreted."""
    report = tmp_path / "aot.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.aot", "--json", str(report)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))["configurations"]
    wanted = {(one.name, arch) for one in aot.DECLARED for arch in one.archs}
    assert {(one["name"], one["arch"]) for one in found} == wanted
    # Attention multiplies by tensor cores, or something is very wrong with its shapes.
    attention = [one for one in found if one["name"].startswith(("decode/l", "prefill/"))]
    assert attention
    assert all(one["tensor_core_ops"] for one in attention)


def test_without_triton_modules_import_and_launches_say_what_is_missing() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from kernels import aot, rotary
from kernels.triton_api import TritonMissing
assert len(aot.DECLARED) > 10
x = torch.zeros(1, 1, 4)
try:
    rotary.rotary(x, x[0, :, :2], x[0, :, :2], x)
except TritonMissing as error:
    assert "_rotary_kernel needs Triton" in str(error)
    print("said")
assert aot.main() == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "said\n"


def test_declarations_are_capped_and_named_once() -> None:
    check_declared(aot.DECLARED)
    one = Declared("a", None, {})
    with pytest.raises(ValueError, match="twice"):
        check_declared([one, one])
    with pytest.raises(ValueError, match="cap"):
        check_declared([Declared(str(i), None, {}) for i in range(aot.MAX_DECLARED + 1)])


def test_every_kernel_module_is_compiled() -> None:
    """A module that declares configurations is one that aot.py knows."""
    modules = {
        path.stem
        for path in (ROOT / "kernels").glob("*.py")
        if "\nDECLARED" in path.read_text(encoding="utf-8") and path.stem != "aot"
    }
    known = {module for module in vars(aot) if hasattr(getattr(aot, module), "DECLARED")}
    assert modules == known


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"stack_bytes": 8}, "spilled"),
        ({"local_bytes": 8}, "spilled"),
        ({"shared_bytes": 164 << 10}, "shared"),
        ({"registers": 255, "num_warps": 16}, "registers"),
    ],
)
def test_limits_bite(change: dict[str, int], word: str) -> None:
    within = {"registers": 128, "stack_bytes": 0, "local_bytes": 0, "shared_bytes": 163 << 10}
    more = {"num_warps": 8, "tensor_core_ops": 1}
    assert not Compiled("x", ARCHS[0], **(within | more)).faults()
    faults = Compiled("x", ARCHS[0], **(within | more | change)).faults()
    assert [word in fault for fault in faults] == [True]
