"""Kernels follow pointers: a layout that they would misread is refused, and holes are seen."""

from collections.abc import Callable

import pytest
import torch

from kernels.gate_mul import gate_mul
from kernels.head_norm import head_norm_
from kernels.int4_layouts import quantize
from kernels.int4_linear import int4_linear
from kernels.logit_edits import edit_, mask_, penalize_
from kernels.rms_norm import rms_norm
from kernels.sampling import draw, draw_of
from kernels.scaled_linear import scaled_linear
from kernels.top_logprobs import top_logprobs
from tests.kernels.guarded import Guards

TURNED = torch.zeros(64, 4).t()  # [4, 64], neighbours 4 elements apart
GAPPED = torch.zeros(4, 70)[:, :64]
PLACE, ONE = torch.zeros(1, dtype=torch.int64), torch.ones(1)
INT4 = quantize(torch.ones(64, 64), 32, torch.float32)
INT8 = torch.zeros(64, 64, dtype=torch.int8)
HOW = draw_of([1.0] * 4, [0.5] * 4, [0.0] * 4, [0] * 4, [1.0] * 4)

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "rms_norm": lambda x: rms_norm(x, None, 1e-6),
    "gate_mul": lambda x: gate_mul(x, "silu"),
    "head_norm": lambda x: head_norm_(x, torch.ones(16), torch.ones(16), 2, 1, 1e-6),
    "scaled_linear": lambda x: scaled_linear(x, INT8, torch.ones(64)),
    "int4_linear": lambda x: int4_linear(x, INT4),
    "draw": lambda x: draw(x, HOW),
    "top_logprobs": lambda x: top_logprobs(x, torch.zeros(4, dtype=torch.int64), 2),
    "edit": lambda x: edit_(x, PLACE, PLACE, ONE),
    "penalize": lambda x: penalize_(x, PLACE, PLACE, ONE, ONE, ONE, ONE),
    "mask": lambda x: mask_(x, torch.zeros(4, 2, dtype=torch.int32)),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "rms_norm": lambda y: rms_norm(torch.ones(4, 64), None, 1e-6, out=(y, y)),
    "gate_mul": lambda y: gate_mul(torch.ones(4, 128), "silu", y),
    "scaled_linear": lambda y: scaled_linear(torch.ones(4, 64), INT8, torch.ones(64), out=y),
    "int4_linear": lambda y: int4_linear(torch.ones(4, 64), INT4, out=y),
}


@pytest.mark.parametrize("name", READS)
def test_rows_that_do_not_lie_together_are_refused(name: str) -> None:
    READS[name](TURNED.contiguous())
    with pytest.raises(ValueError, match="last stride"):
        READS[name](TURNED)


@pytest.mark.parametrize("name", WRITES)
def test_results_with_gaps_are_refused(name: str) -> None:
    WRITES[name](torch.empty(4, 64))
    with pytest.raises(ValueError, match="out is contiguous"):
        WRITES[name](GAPPED)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32])
def test_what_was_never_written_shows(dtype: torch.dtype) -> None:
    guards = Guards()
    out = guards.output(3, 5, dtype=dtype)
    out[:, :4] = 0
    assert not guards.are_whole()
    out[:, 4] = 0
    assert guards.are_whole()
