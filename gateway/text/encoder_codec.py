"""Texts to what an encoder is computed on: token ids with the model's own special tokens around
them, and the segments of pairs. Part of stage 2; runs in the processes of prepare_process.py.

Everything is the tokenizer's own doing (its normaliser, its post-processor), as transformers would
call it; special tokens that a caller types are special tokens, there as here. Only two things are
ours: texts are cut without changing the tokenizer (tokens are taken off before the post-processor
puts the special ones around), and a text of megabytes is read only as far as it
can matter.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from gateway.text.prepare_messages import EncoderFacts, EncoderInput
from gateway.text.templates import read_json
from gateway.text.tokenization import NOT_A_PANIC, TOKENIZER_FILE, read_tokenizer

# Of a longer text the beginning is read first; where that is clearly too many tokens already, so
# many more that where it was cut off changes none of those that count, it stands for the whole.
_CHARS_PER_TOKEN = 16
_SLACK_TOKENS = 64


class TooLong(Exception):
    """The input of this index is more tokens than allowed, which nobody wants to have cut."""

    def __init__(self, index: int, num_tokens: int) -> None:
        super().__init__(f"input {index} has {num_tokens} tokens")
        self.index = index
        self.num_tokens = num_tokens


class EncoderCodec:
    """The tokenizer of one model revision."""

    def __init__(self, tokenizer: Tokenizer, has_segments: bool = True) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._has_segments = has_segments
        self.num_special: int = tokenizer.num_special_tokens_to_add(False)
        """Special tokens around a text."""
        self.num_special_pair: int = tokenizer.num_special_tokens_to_add(True)

    def facts(self) -> EncoderFacts:
        """What the gateway keeps."""
        return EncoderFacts(self.num_special, self.num_special_pair)

    def encode(self, texts: Sequence[str], longest: int, cut: bool = False) -> list[EncoderInput]:
        """Each of at most `longest` tokens, special ones included (there must be room for those).

        Longer texts are cut where `cut`. Raises TooLong, ValueError.
        """
        heads = [self._head(text, longest) for text in texts]
        found = []
        for index, encoding in enumerate(_encode(self._tokenizer, heads, True)):
            if len(encoding) > longest:
                if not cut:
                    raise TooLong(index, len(encoding))
                [bare] = _encode(self._tokenizer, heads[index : index + 1], False)
                bare.truncate(longest - self.num_special)
                encoding = self._tokenizer.post_process(bare)
            found.append(self._input(encoding))
        return found

    def encode_words(self, texts: Sequence[str], longest: int) -> list[EncoderInput]:
        """The same with their words, of texts by themselves. Raises TooLong, ValueError."""
        found = []
        for index, encoding in enumerate(_encode(self._tokenizer, texts, True, offsets=True)):
            if len(encoding) > longest:
                raise TooLong(index, len(encoding))
            found.append(_with_words(encoding))
        return found

    def query(self, text: str, enough: int) -> Encoding:
        """A text by itself, which documents will be put behind; where it is more than `enough`
        tokens, perhaps its beginning only. Raises ValueError."""
        [encoding] = _encode(self._tokenizer, [self._head(text, enough)], False)
        return encoding

    def encode_pairs(
        self, query: Encoding, documents: Sequence[str], longest: int, document_tokens: int = 0
    ) -> list[EncoderInput]:
        """A query with each document, of which as much is kept as fits into `longest` tokens, and
        no more than `document_tokens`; 0: no such bound.

        The query must fit. It is read once a request: a few tokens of it can be megabytes of
        spaces. Raises ValueError.
        """
        room = max(0, longest - self.num_special_pair - len(query))
        room = min(room, document_tokens or room)
        heads = [self._head(document, longest) for document in documents]
        found = []
        for document in _encode(self._tokenizer, heads, False):
            document.truncate(room)
            found.append(self._pair(query, document))
        return found

    def _pair(self, first: Encoding, second: Encoding) -> EncoderInput:
        if self._tokenizer.post_processor is not None:
            return self._input(self._tokenizer.post_process(first, second))
        # Nothing stands around them, and only the library's own pairs have segments then.
        segments = [0] * len(first) + [1] * len(second)
        has_types = self._has_segments and len(second) > 0
        return EncoderInput([*first.ids, *second.ids], segments if has_types else [])

    def _head(self, text: str, longest: int) -> str:
        """So much of a text as tells its first `longest` tokens and whether there are more."""
        num_chars = _CHARS_PER_TOKEN * (longest + _SLACK_TOKENS)
        if len(text) <= num_chars:
            return text
        head = text[:num_chars]
        [encoding] = _encode(self._tokenizer, [head], False)
        return head if len(encoding) > longest + _SLACK_TOKENS else text

    def _input(self, encoding: Encoding) -> EncoderInput:
        type_ids: list[int] = encoding.type_ids if self._has_segments else []
        return EncoderInput(encoding.ids, type_ids if any(type_ids) else [])


def load_encoder_codec(model_dir: Path) -> EncoderCodec:
    """Read a model's files. Raises OSError or ValueError where they are no good."""
    tokenizer = read_tokenizer((model_dir / TOKENIZER_FILE).read_bytes())
    names = read_json(model_dir / "tokenizer_config.json").get("model_input_names")
    return EncoderCodec(tokenizer, not isinstance(names, list) or "token_type_ids" in names)


def _with_words(encoding: Encoding) -> EncoderInput:
    places: dict[int, tuple[int, int]] = {}
    for at, word in enumerate(encoding.word_ids):
        if word is not None:
            places[word] = (places.get(word, (at, at))[0], at + 1)
    offsets = encoding.offsets
    spans = [(offsets[first][0], offsets[end - 1][1]) for first, end in places.values()]
    return EncoderInput(encoding.ids, [], spans, list(places.values()))


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str], special: bool, *, offsets: bool = False
) -> list[Encoding]:
    """As tokenization.py's, several at a time. The library raises bare Exceptions."""
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    try:
        found: list[Encoding] = encode(texts, add_special_tokens=special)
    except NOT_A_PANIC:
        raise
    except BaseException as error:
        raise ValueError(f"the tokenizer cannot encode this text: {error}") from error
    return found
