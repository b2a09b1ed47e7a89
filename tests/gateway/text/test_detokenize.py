"""Text as it comes: exact against the library's own decoding, however the tokens are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.protocol import TokenLogprobs
from gateway.text.detokenize import StopStrings, TextStream, detokenizer
from gateway.text.pieces import PieceTable, read_pieces
from tests.gateway.edge_kit import byte_level_tokenizer, spm_like_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SPM = spm_like_tokenizer()
BYTE_LEVEL_PIECES = PieceTable(read_pieces(BYTE_LEVEL))
SPM_PIECES = PieceTable(read_pieces(SPM))
FIRST_BYTE = 3  # <0x00> in the fixture's vocabulary.


def streamed(pieces: PieceTable, ids: list[int], keep_leading_space: bool = False) -> list[str]:
    """What a client would be sent for each token, and at the end."""
    detok = detokenizer(pieces, keep_leading_space)
    return [*(detok.push(i) for i in ids), detok.flush()]


def library(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def cut(text: str, sizes: list[int]) -> list[str]:
    """A text in pieces of these sizes, round and round."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        size = sizes[len(parts) % len(sizes)]
        parts.append(text[at : at + size])
        at += size
    return parts


def test_the_fixtures_are_of_the_kinds_meant() -> None:
    assert BYTE_LEVEL_PIECES.context_free
    assert not BYTE_LEVEL_PIECES.strip_start
    assert SPM_PIECES.context_free
    assert SPM_PIECES.strip_start


@given(st.text(max_size=60))
def test_any_text_comes_back_byte_level(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    parts = streamed(BYTE_LEVEL_PIECES, ids)
    assert "".join(parts) == library(BYTE_LEVEL, ids)
    if not any(i in BYTE_LEVEL_PIECES.special_ids for i in ids):
        assert "".join(parts) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts) or "\ufffd" in text


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=60))
def test_any_tokens_decode_as_the_library_does_byte_level(ids: list[int]) -> None:
    assert "".join(streamed(BYTE_LEVEL_PIECES, ids)) == library(BYTE_LEVEL, ids)


@given(st.text(max_size=60).filter(lambda text: "▁" not in text and "\ufffd" not in text))
def test_any_text_comes_back_byte_fallback(text: str) -> None:
    ids = SPM.encode(text, add_special_tokens=False).ids
    parts = streamed(SPM_PIECES, ids)
    assert "".join(parts) == library(SPM, ids)
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


@given(st.lists(st.integers(0, SPM.get_vocab_size() - 1), max_size=60))
def test_any_tokens_decode_byte_fallback(ids: list[int]) -> None:
    """As the library does where every run of byte tokens is good UTF-8; else one U+FFFD for each
    bad sequence instead of one for each byte of the run."""
    text = "".join(streamed(SPM_PIECES, ids))
    raw = b"".join(SPM_PIECES.piece(i) for i in ids).decode("utf-8", "replace")
    assert text == raw.removeprefix(" ")
    runs_are_good = "\ufffd" not in library(SPM, ids)
    if runs_are_good:
        assert text == library(SPM, ids)


def test_half_a_character_is_held_back() -> None:
    ids = [byte + FIRST_BYTE for byte in "é😀".encode()]
    assert streamed(SPM_PIECES, ids) == ["", "é", "", "", "", "😀", ""]
    assert streamed(SPM_PIECES, ids[:4])[-1] == "\ufffd"


def test_a_continuation_keeps_its_space() -> None:
    ids = SPM.encode("is the", add_special_tokens=False).ids
    assert "".join(streamed(SPM_PIECES, ids)) == "is the"
    assert "".join(streamed(SPM_PIECES, ids, keep_leading_space=True)) == " is the"


def test_special_tokens_have_no_text_and_plain_added_ones_do() -> None:
    ids = BYTE_LEVEL.encode("a<|im_end|><think>b").ids
    assert "".join(streamed(BYTE_LEVEL_PIECES, ids)) == "a<think>b"


def test_decoders_that_look_at_neighbours_are_read_through_a_window() -> None:
    vocab = {"[UNK]": 0, "un": 1, "##aff": 2, "##able": 3, "walk": 4, "don": 5, "'": 6, "t": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    pieces = PieceTable(read_pieces(tokenizer))
    assert not pieces.context_free
    for ids in ([1, 2, 3, 4, 1], [4, 4, 2], [5, 6, 7, 99, 4]):
        assert "".join(streamed(pieces, ids)) == library(tokenizer, ids)


def test_a_tokenizer_without_a_decoder() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    pieces = PieceTable(read_pieces(tokenizer))
    assert "".join(streamed(pieces, [0, 1, 1])) == library(tokenizer, [0, 1, 1])


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the stop string that is complete first; None without one. By brute force."""
    for end in range(1, len(text) + 1):
        at = [end - len(s) for s in stops if text[:end].endswith(s)]
        if at:
            return text[: min(at)]
    return None


LETTERS = st.text("ab<", max_size=30)


@given(
    LETTERS,
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
def test_stop_strings_do_not_depend_on_the_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopStrings(tuple(stops))
    out, found = [], False
    for part in cut(text, sizes):
        piece, found = matcher.push(part)
        out.append(piece)
        if found:
            break
    if not found:
        out.append(matcher.flush())
    expected = first_stop(text, tuple(stops))
    assert found == (expected is not None)
    assert "".join(out) == (text if expected is None else expected)


def test_text_is_released_as_soon_as_it_cannot_be_a_stop() -> None:
    matcher = StopStrings(("END",))
    assert matcher.push("the E") == ("the ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("T") == ("ENT", False)
    assert matcher.push("ENDx") == ("", True)


def stream_of(stops: tuple[str, ...] = (), stop_ids: list[int] | None = None) -> TextStream:
    return TextStream(BYTE_LEVEL_PIECES, stops, stop_ids or [])


@given(
    st.sampled_from([BYTE_LEVEL_PIECES, SPM_PIECES]),
    st.lists(st.integers(0, 300), max_size=40),
    st.sets(st.integers(0, 300), max_size=2),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_text_and_counts_do_not_depend_on_how_many_tokens_come_at_once(
    pieces: PieceTable, ids: list[int], stop_ids: set[int], sizes: list[int]
) -> None:
    alone, grouped = (TextStream(pieces, (), sorted(stop_ids)) for _ in range(2))
    one_by_one = "".join(alone.push([token_id]) for token_id in ids) + alone.finish()
    text, at = "", 0
    for size in sizes * len(ids):
        text += grouped.push(ids[at : at + size])
        at += size
    assert text + grouped.finish() == one_by_one
    assert grouped.num_tokens == alone.num_tokens


def test_tokens_up_to_the_stop_are_counted_and_later_ones_are_not() -> None:
    ids = BYTE_LEVEL.encode("ab STOP cd ef").ids
    for size in (1, 2, 3, len(ids)):
        stream = stream_of(("STOP",))
        text = "".join(stream.push(ids[at : at + size]) for at in range(0, len(ids), size))
        assert text + stream.finish() == "ab "
        assert stream.stopped
        needed = next(n for n in range(len(ids)) if "STOP" in library(BYTE_LEVEL, ids[:n]))
        assert stream.num_tokens == needed


@given(st.text(max_size=40), st.text(min_size=1, max_size=3), st.integers(1, 7))
def test_stop_strings_across_tokens(text: str, stop: str, size: int) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    whole = library(BYTE_LEVEL, ids)
    stream = stream_of((stop,))
    out = "".join(stream.push(ids[at : at + size]) for at in range(0, len(ids), size))
    out += stream.finish()
    assert out == whole.partition(stop)[0]
    assert stream.stopped == (stop in whole)
    if stream.stopped:
        assert stop in library(BYTE_LEVEL, ids[: stream.num_tokens])
        assert stop not in library(BYTE_LEVEL, ids[: stream.num_tokens - 1])
    else:
        assert stream.num_tokens == len(ids)


def test_a_stop_token_counts_and_has_no_text() -> None:
    word = BYTE_LEVEL.encode("game").ids
    stream = stream_of(stop_ids=[word[-1]])
    assert stream.push(word) == library(BYTE_LEVEL, word[:-1])
    assert stream.num_tokens == len(word)


@pytest.mark.parametrize("stop", ["\ufffd", "x"])
def test_what_is_left_at_the_end_is_searched_too(stop: str) -> None:
    half = BYTE_LEVEL.encode("ж").ids[:1]
    stream = stream_of((stop,))
    text = stream.push(half) + stream.finish()
    assert (text, stream.stopped) == (("", True) if stop == "\ufffd" else ("\ufffd", False))


def scored_in(stream: TextStream, ids: list[int], size: int) -> list[tuple[int, int, str]]:
    """(token, start, text that came with it) for every piece of `size` tokens."""
    out = []
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        text = stream.push(part, [TokenLogprobs(-1.0, [])] * len(part))
        out += [(s.token_id, s.start, text) for s in stream.take_scored()]
    text = stream.finish()
    return [*out, *((s.token_id, s.start, text) for s in stream.take_scored(ended=True))]


@given(st.text(max_size=40), st.integers(1, 7))
def test_scores_come_once_each_and_with_their_place(text: str, size: int) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    taken = scored_in(stream_of(), ids, size)
    assert [token_id for token_id, _, _ in taken] == ids
    starts = [start for _, start, _ in taken]
    assert starts == sorted(starts)
    whole = library(BYTE_LEVEL, ids)
    for at, start in enumerate(starts):
        assert whole.startswith(library(BYTE_LEVEL, ids[:at]).rstrip("\ufffd"))
        assert start <= len(library(BYTE_LEVEL, ids[:at]))


@given(st.text("abEND ", max_size=30), st.integers(1, 7))
def test_scores_end_at_the_stop_string(text: str, size: int) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    taken = [token_id for token_id, _, _ in scored_in(stream_of(("END",)), ids, size)]
    shown = library(BYTE_LEVEL, ids).partition("END")[0]
    spelled = library(BYTE_LEVEL, taken)
    assert taken == ids[: len(taken)]
    assert spelled.startswith(shown)
    # No token that shows nothing: without the last one something would be missing.
    assert not taken or len(library(BYTE_LEVEL, taken[:-1])) < max(1, len(shown))


def test_stop_tokens_have_no_scores() -> None:
    word = BYTE_LEVEL.encode("game").ids
    stream = stream_of(stop_ids=[word[-1]])
    assert [t for t, _, _ in scored_in(stream, word, 1)] == word[:-1]


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    ids = [BYTE_LEVEL.encode(c).ids[0] for c in "xxaxx"]
    for least, text in ((0, ""), (1, "x"), (2, "xxa"), (3, "xxa"), (4, "xxax"), (5, "xxaxx")):
        stream = TextStream(BYTE_LEVEL_PIECES, ("x",), [], min_tokens=least)
        assert stream.push(ids) + stream.finish() == text
    assert stream.stopped is False


@pytest.mark.parametrize(
    ("pieces", "tokenizer"), [(BYTE_LEVEL_PIECES, BYTE_LEVEL), (SPM_PIECES, SPM)]
)
def test_control_tokens_that_a_parser_has_to_see(pieces: PieceTable, tokenizer: Tokenizer) -> None:
    mark = min(pieces.special_ids)
    name = tokenizer.id_to_token(mark)
    ids = [mark, *tokenizer.encode("a", add_special_tokens=False).ids, mark]
    shown = TextStream(pieces, (), [], shown_ids=frozenset({mark}))
    text = "".join(shown.push([token_id]) for token_id in ids) + shown.finish()
    assert text.replace(" ", "") == f"{name}a{name}"
    hidden = TextStream(pieces, (), [])
    assert (hidden.push(ids) + hidden.finish()).strip() == "a"


def test_a_decoder_that_panics_is_not_run() -> None:
    """Strip panics where nothing is left to strip: here at "##" behind any token. A panic is no
    Exception, and this runs inside the dispatcher's calls."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "##": 1}, "a"))
    steps = [decoders.WordPiece("##", cleanup=False), decoders.Strip(" ", 0, 1)]
    tokenizer.decoder = decoders.Sequence(steps)
    with pytest.raises(BaseException, match="index out of bounds"):
        tokenizer.decode([0, 1])
    with pytest.raises(ValueError, match="strips the ends"):
        read_pieces(tokenizer)
