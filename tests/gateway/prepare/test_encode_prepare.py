"""Requests to encoders cut into pieces, and read no further than they may be long."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer

from engine.protocol import EncodeInputs
from gateway.api.encode_wire import EncodeAsk
from gateway.auth.directory import Directory
from gateway.errors import ApiError
from gateway.prepare.encode_prepare import EncodePreparer, pieces_of
from gateway.text import encoder_codec
from gateway.text.codecs import Codecs
from gateway.text.encoder_codec import EncoderCodec
from gateway.text.prepare_messages import EncoderInput
from gateway.text.prepare_pool import PreparePool
from gateway.types import PreparedRequest, Principal
from registry.accounts.quotas import Limits
from tests.gateway.encoder_kit import encoder_models, write_encoder
from tests.gateway.prepare_kit import InlinePool
from tests.gateway.scripted_worker import prepared

WHO = Principal("ten", "key", frozenset({"inference"}), Limits())


def request_of(lengths: list[int], *, types: bool) -> PreparedRequest:
    tokens = list(range(sum(lengths)))
    encode = EncodeInputs(lengths, [token % 2 for token in tokens] if types else [])
    return msgspec.structs.replace(
        prepared("r", max_tokens=0), prompt_token_ids=tokens, encode=encode
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=600), st.integers(1, 100), st.booleans())
def test_pieces_are_the_request_in_its_order(
    lengths: list[int], piece_tokens: int, types: bool
) -> None:
    request = request_of(lengths, types=types)
    pieces = pieces_of(request, piece_tokens)
    encodes = [piece.encode for piece in pieces if piece.encode is not None]
    assert [n for encode in encodes for n in encode.lengths] == lengths
    assert [i for piece in pieces for i in piece.prompt_token_ids] == request.prompt_token_ids
    assert request.encode is not None
    assert [i for encode in encodes for i in encode.type_ids] == request.encode.type_ids
    for piece, encode in zip(pieces, encodes, strict=True):
        assert sum(encode.lengths) == len(piece.prompt_token_ids)
        assert len(encode.lengths) <= 256
        assert len(encode.lengths) == 1 or sum(encode.lengths) <= piece_tokens
    names = [piece.request_id for piece in pieces]
    assert names == (["r"] if len(pieces) == 1 else [f"r#{n}" for n in range(len(pieces))])
    # None is cut sooner than it has to be.
    for one, other in pairwise(encodes):
        assert len(one.lengths) == 256 or sum(one.lengths) + other.lengths[0] > piece_tokens


def preparer(folder: Path, max_tokens: int, pool: PreparePool | None = None) -> EncodePreparer:
    write_encoder(folder)
    directory = Directory()
    directory.replace(1, [], encoder_models(folder))
    return EncodePreparer(directory, Codecs(pool or InlinePool(), 2), max_tokens)


async def test_texts_are_encoded_some_at_a_time_and_no_further_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = preparer(tmp_path, max_tokens=500)
    batches: list[int] = []
    encode = EncoderCodec.encode

    def recording(
        codec: EncoderCodec, texts: list[str], longest: int, cut: bool = False
    ) -> list[EncoderInput]:
        batches.append(len(texts))
        return encode(codec, texts, longest, cut)

    monkeypatch.setattr(EncoderCodec, "encode", recording)
    texts = ("the cat",) * 2000
    with pytest.raises(ApiError, match="more than 500 tokens"):
        await stage.prepare(EncodeAsk("embedding", "embed", texts), WHO, {}, "embd-1", 0.0)
    assert batches == [64, 64]  # four tokens each
    asked = EncodeAsk("embedding", "embed", texts[:100])
    found = await stage.prepare(asked, WHO, {}, "embd-1", 5.0)
    assert len(found.request.prompt_token_ids) == 400
    assert (found.width, found.cache.decision, found.request.created_at) == (4, "off", 5)


async def test_what_waits_for_the_processes_is_bounded(tmp_path: Path) -> None:
    stage = preparer(tmp_path, max_tokens=500, pool=PreparePool(1, max_pending=0))
    with pytest.raises(ApiError) as caught:
        await stage.prepare(EncodeAsk("embedding", "embed", ("a",)), WHO, {}, "embd-1", 0.0)
    assert caught.value.kind.code == "queue_full"


async def test_a_text_of_no_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = preparer(tmp_path, max_tokens=500)
    monkeypatch.setattr(EncoderCodec, "encode", lambda *_: [EncoderInput([])])
    with pytest.raises(ApiError, match="has no tokens"):
        await stage.prepare(EncodeAsk("embedding", "embed", (" ",)), WHO, {}, "embd-1", 0.0)


async def test_a_text_the_tokenizer_fails_on_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> list[EncoderInput]:
        raise ValueError("the tokenizer cannot encode this text: because")

    stage = preparer(tmp_path, max_tokens=500)
    monkeypatch.setattr(EncoderCodec, "encode_pairs", failing)
    asked = EncodeAsk("rerank", "cross", ("a",), "cat")
    with pytest.raises(ApiError, match="cannot encode") as caught:
        await stage.prepare(asked, WHO, {}, "rerank-1", 0.0)
    assert (caught.value.kind.status, caught.value.param) == (400, "documents")


async def test_a_query_is_read_once_however_many_documents_it_stands_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    encode = encoder_codec._encode

    def counted(tokenizer: Tokenizer, texts: Sequence[str], special: bool) -> list[Encoding]:
        nonlocal read
        read += sum(len(text) for text in texts)
        return encode(tokenizer, texts, special)

    monkeypatch.setattr(encoder_codec, "_encode", counted)
    stage = preparer(tmp_path, max_tokens=5_000)
    query = "cat" + " " * 100_000
    asked = EncodeAsk("rerank", "cross", ("the moon",) * 200, query)
    found = await stage.prepare(asked, WHO, {}, "rerank-1", 0.0)
    assert found.request.encode is not None
    assert found.request.encode.lengths == [6] * 200
    assert read < 3 * len(query)


@pytest.mark.parametrize("kind", ["embedding", "rerank"])
async def test_a_token_without_a_row_is_the_requests_error(tmp_path: Path, kind: Any) -> None:
    """Registration takes tokenizers that have more tokens than the model: [PAD] is often so."""
    write_encoder(tmp_path)
    directory = Directory()
    models = [replace(model, vocab_size=6) for model in encoder_models(tmp_path)]
    directory.replace(1, [], models)
    stage = EncodePreparer(directory, Codecs(InlinePool(), 2), 500)
    name = "embed" if kind == "embedding" else "cross"
    asked = EncodeAsk(kind, name, ("the cat",), "moon" if kind == "rerank" else "")
    with pytest.raises(ApiError, match="no row: its last is 5") as caught:
        await stage.prepare(asked, WHO, {}, "r-1", 0.0)
    assert caught.value.kind.status == 400
