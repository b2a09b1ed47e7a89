"""What a profile says of spans: overlaps count once, the dearest kernels first, names bare."""

import pytest

from bench.gpu_profile import MOST_KERNELS, of_device, short


def test_spans_that_overlap_are_busy_once() -> None:
    spans = [("copy", 5.0, 26.0), ("gemm<float>(int)", 0.0, 10.0), ("void gemm<half>", 30.0, 40.0)]
    found = of_device(spans, num_steps=2, step_ms=0.05)
    assert found["busy_ms"] == pytest.approx(0.018)
    assert found["gap_ms"] == pytest.approx(0.032)
    assert found["launches"] == 1.5
    assert list(found["kernels"]) == ["copy", "gemm", "others"]
    assert found["kernels"]["gemm"] == "10.0 us, 1 launches"


def test_what_is_cheap_is_summed() -> None:
    spans = [(f"k{i}", 100.0 * i, 100.0 * i + 50 - i) for i in range(MOST_KERNELS + 2)]
    found = of_device(spans, num_steps=1, step_ms=1.0)
    assert len(found["kernels"]) == MOST_KERNELS + 1
    assert found["kernels"]["others"] == f"{2 * 50 - 2 * MOST_KERNELS - 1:.1f} us"


def test_a_name_without_a_rest_is_kept() -> None:
    assert short("<unnamed>") == "<unnamed>"
