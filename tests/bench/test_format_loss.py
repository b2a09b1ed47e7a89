"""The perplexity of formats on a few words; the memory of one small registration."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench import format_loss, format_memory
from bench.format_loss import FORMATS, TARGETS, losses_of, perplexity, table
from bench.swap_load import DEMO_MODELS


@pytest.fixture
def rows() -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(DEMO_MODELS / "shakespeare" / "tokenizer.json"))
    text = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet"
    return torch.tensor([tokenizer.encode(text).ids])


def test_a_format_is_what_its_twin_is_and_dtypes_add(tmp_path: Path, rows: torch.Tensor) -> None:
    label = "FP8, blocks of 128"
    found = losses_of("shakespeare", {label: FORMATS[label]}, rows, tmp_path)
    assert found["num_tokens"] == rows.shape[1] - 1
    assert found[label].keys() == {"float32", *TARGETS}
    # The checkpoint that was left, in float32, is its twin.
    again = perplexity(tmp_path / "model", tmp_path / "packs", "float32", rows)
    assert again == found[label]["float32"] != found["plain"]["float32"]
    for dtype in TARGETS:
        assert found[label][dtype] == pytest.approx(found[label]["float32"], rel=0.1)
    assert not list((tmp_path / "packs").iterdir())
    lines = table({"shakespeare": found}).splitlines()
    assert lines[0] == "| format | itself | bfloat16 adds | int8 adds | fp8 adds | int4 adds |"
    assert lines[2].startswith("| plain | - | ")
    assert lines[3].startswith(f"| {label} | ")
    assert lines[3].count("%") == 5


@pytest.mark.parametrize("label", FORMATS)
def test_every_format_can_be_written(label: str) -> None:
    weight = torch.randn(96, 352) * 0.1
    tensors, values = FORMATS[label].write(weight)
    assert tensors
    off = (values - weight).norm() / weight.norm()
    assert 0 < float(off) < 0.13


@pytest.mark.soak
def test_the_peak_is_read_of_the_process(tmp_path: Path) -> None:
    peak = format_memory.registered(DEMO_MODELS / "shakespeare", tmp_path / "packs", "int4")
    assert 100 << 20 < peak < 4 << 30


def test_a_folder_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        format_loss.parse([])
    assert "folder of corpora" in capsys.readouterr().err
