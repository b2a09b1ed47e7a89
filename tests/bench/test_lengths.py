"""Real lengths: what is read, cut, scaled and drawn."""

import gzip
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bench import lengths
from bench.lengths import Length


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with two prompts and three rows of a trace."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    write(tmp_path / lengths.TOKENIZER, tokenizer.to_str())
    rows = [
        {"turns": ["a b c d"], "answer_tokens": {"x": 103, "y": 7}},
        {"turns": ["a", "b"], "answer_tokens": {"x": 0}},
    ]
    write(tmp_path / "prompts/arena_hard.jsonl.gz", "".join(json.dumps(r) + "\n" for r in rows))
    trace = "t_s,in_tokens,out_tokens\n0.0,374,44\n4.0,396,109\n8.0,0,1\n"
    write(tmp_path / "traces/azure2023_conv.csv.gz", trace)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def test_both_kinds_of_sets_are_read(data: Path) -> None:
    assert lengths.read(data, "arena_hard") == [Length(4, 103), Length(4, 7), Length(2, 1)]
    rows = lengths.read(data, "azure2023_conv")
    assert rows == [Length(374, 44), Length(396, 109), Length(1, 1)]
    with pytest.raises(ValueError, match="not 'other'"):
        lengths.read(data, "other")
    with pytest.raises(OSError, match="azure2023_code"):
        lengths.read(data, "azure2023_code")


def test_lengths_are_cut_to_a_context_answer_first_kept() -> None:
    assert Length(100, 50).cut(1000) == Length(100, 50)
    assert Length(100, 50).cut(120) == Length(70, 50)
    assert Length(100, 500).cut(64) == Length(1, 63)


def test_scaling_keeps_every_length_positive_and_in_the_context() -> None:
    rows = [Length(10, 4), Length(4000, 900), Length(3, 1)]
    factor = lengths.scale_to(rows, context=512, max_prompt_tokens=64)
    scaled = [row.scaled(factor, 64) for row in rows]
    assert scaled == [Length(5, 2), Length(64, 448), Length(1, 1)]
    assert lengths.scale_to(rows, context=8192, max_prompt_tokens=64) == 1.0


def test_the_stream_gives_each_length_once_a_round_in_changing_order() -> None:
    rows = [Length(n, 1) for n in range(1, 21)]
    drawn = list(itertools.islice(lengths.stream(rows, seed=3), 40))
    assert set(drawn[:20]) == set(drawn[20:]) == set(rows)
    assert drawn[:20] != drawn[20:]
    assert drawn == list(itertools.islice(lengths.stream(rows, seed=3), 40))
