"""What steps launch goes through Triton's JIT for a GPU, in a process of its own."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.gpu_compile import check_waits
from kernels.triton_api import HAS_TRITON

NEXT, WAIT = "griddepcontrol.launch_dependents;\n", "griddepcontrol.wait;\n"
LOAD, STORE = "@%p1 ld.global.v4.b32 {};\n", "st.global.b16 [%rd1], %rs1;\n"
ROOT = Path(__file__).resolve().parents[2]


def test_only_first_weights_are_read_before_the_wait() -> None:
    for name in ("_few_rows_kernel", "_decode_kernel"):
        check_waits(name, LOAD + STORE)
        check_waits(name, NEXT + WAIT + LOAD + STORE)
        with pytest.raises(ValueError, match="before it waits"):
            check_waits(name, STORE + NEXT + WAIT)
    check_waits("_few_rows_kernel", LOAD + NEXT + WAIT)
    with pytest.raises(ValueError, match="before it waits"):
        check_waits("_decode_kernel", NEXT + LOAD + WAIT)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_model_is_compiled_and_each_kernel_once() -> None:
    """More variants than these would be compiled in the midst of serving, a second each."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gpu_compile", "--only", "llama 128"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    made = Counter(words[2] for words in lines if words[:2] == ["llama", "128"])
    # With and without a residual; as a whole and in parts.
    assert made.pop("_rms_norm_kernel") == 2
    assert made.pop("_decode_kernel") == 2
    # For one row: q, k and v of the first layer and of others, gate and up, two depths.
    assert made.pop("_few_rows_kernel") == 5
    assert set(made.values()) == {1}
    assert {"_write_kernel", "_prefill_kernel", "_join_kernel", "_cut_kernel"} <= set(made)
    assert lines[-1] == [str(sum(made.values()) + 9), "kernels"]
