"""Reading a tokenizer.json within limits: whole ones, broken ones, and those that take too much."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from engine.errors import RegistrationRefused
from engine.registration.tokenizer_check import check_readable
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.test_convert import SHAPE
from tests.engine.registration.test_register import last, run

BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


def hostile(num_tokens: int, *normalizers: dict[str, Any]) -> str:
    """Added tokens that go through normalizers when the file is read."""
    added = [
        {
            "id": 2 + number,
            "content": "a" * 20 + f"b{number}",
            "normalized": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False),
        }
        for number in range(num_tokens)
    ]
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    parts = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    normalizer = {"type": "Sequence", "normalizers": normalizers}
    whole = {"version": "1.0", "added_tokens": added, "normalizer": normalizer, "model": model}
    return json.dumps({**parts, **whole})


def refusal(path: Path, **limits: Any) -> RegistrationRefused:
    with pytest.raises(RegistrationRefused) as found:
        check_readable(path, **limits)
    assert str(path) in str(found.value)
    return found.value


def test_what_can_be_read_and_what_cannot(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(hostile(1))
    check_readable(path)
    path.write_text("{}")
    assert refusal(path).code == "no_tokenizer"
    path.write_bytes(b"\xff\xfe")
    problem = refusal(path)
    assert problem.code == "no_tokenizer"
    assert "UTF-8" in str(problem)


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(hostile(20_000, BACKTRACKING))  # some minutes
    assert refusal(path, cpu_s=0.2).code == "unusable_text_files"


def test_one_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(hostile(1, *[TENFOLD] * 9))  # 20 GB
    assert refusal(path, memory_bytes=64 << 20).code == "unusable_text_files"


@pytest.mark.parametrize("text", ["{}", hostile(1, *[TENFOLD] * 9)])
def test_a_registration_refuses_it_and_goes_on_with_the_next(tmp_path: Path, text: str) -> None:
    bad = hf_folder(tmp_path / "bad", LlamaConfig(**SHAPE))
    (bad / "tokenizer.json").write_text(text)
    good = hf_folder(tmp_path / "good", LlamaConfig(**SHAPE), seed=1)
    status, events = run("--source", str(bad), "--source", str(good), "--dest", str(tmp_path / "p"))
    assert status == 1
    code = "no_tokenizer" if text == "{}" else "unusable_text_files"
    assert last(events)[str(bad)]["code"] == code
    assert str(bad) in last(events)[str(bad)]["message"]
    assert last(events)[str(good)]["event"] == "ready"
