"""A pack whose template or tokenizer takes too much never becomes ready."""

from pathlib import Path

import pytest
from tokenizers import Regex, decoders, normalizers

from admin.context.operator_context import OperatorContext
from admin.operations import models
from admin.registration import registrar
from admin.registration.text_probe import check_text_files
from gateway.settings.settings import Settings
from tests.admin.registration.test_registrar import FAKE, folder
from tests.gateway.edge_kit import CHAT_TEMPLATE, write_model
from tests.gateway.encoder_kit import write_encoder

SETTINGS = Settings(prepare_cpu_s=0.2, prepare_memory_bytes=256 << 20)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Passed by, until a model answers: what is rendered when the files are read has no such text.
LATER = "{% if 'afoot' in messages[0].content %}" + LOOP + "{% endif %}"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None, "{{ raise_exception('no') }}"])
def test_what_is_honest_is_ready(tmp_path: Path, template: str | None) -> None:
    write_model(tmp_path, template)
    assert check_text_files(tmp_path, "generate", 256, 1000, SETTINGS) == ""


def test_an_encoder(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    assert check_text_files(tmp_path, "embed", 64, 1000, SETTINGS) == ""


def test_only_tokens_that_texts_need_must_have_rows(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path)
    num_rows = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert check_text_files(tmp_path, "generate", 256, num_rows, SETTINGS) == ""
    problem = check_text_files(tmp_path, "generate", 256, 40, SETTINGS)
    assert "embedding has only 40 rows" in problem
    write_encoder(tmp_path)
    assert "embedding has only 4 rows" in check_text_files(tmp_path, "embed", 64, 4, SETTINGS)


@pytest.mark.parametrize("kind", ["loop", "normalizer", "decoder", "nothing"])
def test_what_takes_too_much_is_not(tmp_path: Path, kind: str) -> None:
    tokenizer = write_model(tmp_path, LATER if kind == "loop" else CHAT_TEMPLATE)
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 9)
    elif kind == "decoder":
        replace = decoders.Replace(Regex("(a+)+$"), "b")
        tokenizer.decoder = decoders.Sequence([decoders.WordPiece(), replace])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if kind == "nothing":
        (tmp_path / "tokenizer.json").write_text("{}")
    problem = check_text_files(tmp_path, "generate", 256, 1000, SETTINGS)
    assert problem.startswith("its tokenizer")
    assert str(tmp_path) not in problem


def test_a_registration_that_ends_so(
    context: OperatorContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, int]] = []

    def check(pack: Path, task: str, max_context: int, num_rows: int, settings: Settings) -> str:
        asked.append((pack.name, task, max_context))
        return "its tokenizer takes too much" if len(asked) == 1 else ""

    monkeypatch.setattr(registrar, "check_text_files", check)
    source = folder(tmp_path, "good")
    for state, code in (("failed", "unusable_text_files"), ("ready", "")):
        begun = models.begin_registration(context, "m", source)
        (model,) = registrar.run(context, [begun], command=FAKE)
        assert (model.state, model.reason_code) == (state, code)
    assert asked == [("rev-good-auto", "generate", 256)] * 2
