"""The sweep over shapes of launch without a GPU: tiny, interpreted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import few_rows as bench
from bench.few_rows_cases import PRODUCTS
from bench.kernel_cases import Rig
from bench.kernel_timing import Ceilings
from kernels import few_rows
from kernels.few_rows import LaunchShape, shape_for

RIG = Rig(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))


def test_shapes_are_sensible() -> None:
    for product in PRODUCTS:
        for rows in (1, 2, 4):
            found = bench.shapes(product, rows)
            assert shape_for(rows, product.n, product.k, product.gated) in found
            assert len(found) == len(set(found)) > 8


def test_the_fastest_is_found_and_wrong_ones_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(PRODUCTS[2], n=12, k=80)
    tried = [LaunchShape(2, 32, 1), LaunchShape(4, 32, 1), LaunchShape(4, 64, 1)]
    times = iter([30.0, 10.0, 20.0, 40.0])
    limits: Ceilings = {"copy_gb_s": 100.0, "matmul_tflop_s": 1.0}
    assert bench.sweep(tiny, 2, tried, RIG, limits, lambda call: next(times)) == tried[1]
    printed = capsys.readouterr().out
    assert printed.index("(4, 32, 1)") < printed.index("(4, 64, 1)") < printed.index("(2, 32, 1)")

    right = few_rows.few_rows

    def wrong(*given: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, h = right(*given, **how)
        return (2 * y if how.get("shape") == tried[1] else y), h

    monkeypatch.setattr("bench.few_rows_cases.few_rows", wrong)
    times = iter([30.0, 20.0, 40.0])
    assert bench.sweep(tiny, 2, tried, RIG, limits, lambda call: next(times)) == tried[2]
    assert "is WRONG" in capsys.readouterr().out


def test_shapes_that_compile_alike_are_compiled_once() -> None:
    tasks = [(product, 1, LaunchShape(4, 256, 4)) for product in PRODUCTS]
    assert len({bench._form(task) for task in tasks}) == 7


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert bench.main([]) == 2
        assert "needs a CUDA device" in capsys.readouterr().out
