"""Texts to encoders' inputs, held to the tokenizer's own truncation and pairing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from gateway.text.encoder_codec import EncoderCodec, TooLong, load_encoder_codec
from tests.gateway.encoder_kit import CLS, SEP, WORDS, bert_like_tokenizer, write_encoder

TEXTS = [
    "the cat sat",
    "A DOG ran to the moon",
    "xyz",
    "",
    "the [SEP] cat",
    "caf\u00e9 the",
    "\ud55c",
]


def roberta_like() -> Tokenizer:
    tokenizer = bert_like_tokenizer()
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return tokenizer


def bert_like() -> Tokenizer:
    tokenizer = bert_like_tokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return tokenizer


def bare() -> Tokenizer:
    tokenizer = bert_like_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    return tokenizer


def unprocessed() -> Tokenizer:
    told = json.loads(bert_like_tokenizer().to_str())
    return Tokenizer.from_str(json.dumps({**told, "post_processor": None}))


KINDS = [bert_like_tokenizer, bert_like, roberta_like, bare, unprocessed]


@pytest.mark.parametrize("make", KINDS)
def test_texts_are_as_the_tokenizer_has_them(make: Callable[[], Tokenizer]) -> None:
    found = EncoderCodec(make()).encode(TEXTS, 100)
    assert [item.ids for item in found] == [make().encode(text).ids for text in TEXTS]
    assert not any(item.type_ids for item in found)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("longest", [5, 6, 9])
def test_texts_are_cut_as_the_tokenizer_cuts(make: Callable[[], Tokenizer], longest: int) -> None:
    tokenizer = make()
    tokenizer.enable_truncation(longest)
    texts = [*TEXTS, " ".join(WORDS), " ".join(WORDS) * 400]
    found = EncoderCodec(make()).encode(texts, longest, cut=True)
    assert [item.ids for item in found] == [tokenizer.encode(text).ids for text in texts]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("longest", [7, 8, 12, 100])
def test_of_pairs_the_document_is_cut(make: Callable[[], Tokenizer], longest: int) -> None:
    tokenizer = make()
    tokenizer.enable_truncation(longest, strategy="only_second")
    documents = [*TEXTS, " ".join(WORDS), " ".join(WORDS) * 400]
    codec = EncoderCodec(make())
    found = codec.encode_pairs(codec.query("the cat", longest), documents, longest)
    wanted = [tokenizer.encode("the cat", document) for document in documents]
    assert [item.ids for item in found] == [encoding.ids for encoding in wanted]
    types = [item.type_ids or [0] * len(item.ids) for item in found]
    assert types == [encoding.type_ids for encoding in wanted]


def test_a_longer_text_is_named_where_nobody_wants_it_cut() -> None:
    codec = EncoderCodec(bert_like_tokenizer())
    with pytest.raises(TooLong) as caught:
        codec.encode(["the cat", "the cat sat on the mat"], 6)
    assert (caught.value.index, caught.value.num_tokens) == (1, 8)


def test_megabytes_are_read_as_far_as_they_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = EncoderCodec(bert_like_tokenizer())
    read: list[int] = []
    heads = codec._head

    def head(text: str, longest: int) -> str:
        found = heads(text, longest)
        read.append(len(found))
        return found

    monkeypatch.setattr(codec, "_head", head)
    text = "the cat " * 500_000
    with pytest.raises(TooLong):
        codec.encode([text], 16)
    [cut] = codec.encode([text], 16, cut=True)
    [pair] = codec.encode_pairs(codec.query("the", 16), [text], 16)
    assert len(cut.ids) == len(pair.ids) == 16
    assert len(codec.query(text, 16)) > 16
    assert max(read) < 10_000


def test_a_text_that_is_long_and_few_tokens_is_read_to_its_end() -> None:
    codec = EncoderCodec(bert_like_tokenizer())
    text = " " * 100_000 + "cat"
    [found] = codec.encode([text], 16)
    assert found.ids == [CLS, bert_like_tokenizer().token_to_id("cat"), SEP]


def test_segments_are_left_out_where_the_model_does_not_read_them(tmp_path: Path) -> None:
    for names, expected in [
        (None, True),
        (["input_ids", "token_type_ids"], True),
        (["input_ids", "attention_mask"], False),
    ]:
        write_encoder(tmp_path, **({} if names is None else {"model_input_names": names}))
        codec = load_encoder_codec(tmp_path)
        [pair] = codec.encode_pairs(codec.query("the", 16), ["cat"], 16)
        assert bool(pair.type_ids) is expected
        assert len(pair.ids) == 5  # what the file says of truncation and padding does not count


def test_files_that_are_no_good(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="tokenizer"):
        load_encoder_codec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer"):
        load_encoder_codec(tmp_path)
