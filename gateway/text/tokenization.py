"""Text to token ids and back for one model revision. Part of stages 2 and 9.

Comes in: messages or a prompt. Goes out: token ids; and for stage 9 the bytes each token stands
for (pieces.py). Files are read from the pack's folder. All of it runs in the processes of
prepare_process.py, for the files are a stranger's: what templates and tokenizers raise is a
refusal, and what they take is bounded there.

Control tokens in a chat. `<|im_end|>` ends a turn only where the chat template wrote it; a caller
who types it must get ten ordinary characters. The `tokenizers` library cannot tell the two apart,
so what callers write is checked first (`ControlTokens.guard`):

    nothing found (nearly always)   render, encode as transformers does
    something found                 its first character is replaced by a mark that templates pass
                                    through; after rendering, control tokens still whole are the
                                    template's own. They are replaced by secret names, the marks by
                                    the characters they stand for, and a second tokenizer encodes
                                    the result: the same one, but with its control tokens renamed
                                    to those secret names. So nothing a caller can write is a
                                    control token to it, and all else stays as it was.

The guard also marks the beginning of one at a message's end, the end of one at a message's
beginning and a message that is the middle of one: the template could join them to a whole
("<|im_" + "end|>"). Known gap: a template that deletes text inside a message could join halves.

For plain completions the prompt is the caller's own and control tokens in it are meant.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from gateway.api.reasoning_types import EFFORTS
from gateway.api.tool_messages import wants_text
from gateway.text.pieces import MAX_TOKENS, read_pieces
from gateway.text.prepare_messages import TextFacts
from gateway.text.templates import (
    ChatTemplate,
    TemplateRefused,
    load_template,
    read_json,
    special_tokens,
)

TOKENIZER_FILE = "tokenizer.json"
NOTHING = "(?!)"
# Roles and types, which templates compare with: nobody's text. Without them `<|function|>` in a
# vocabulary would have `"type": "function"` marked.
_KEYWORDS = frozenset(
    {"system", "user", "assistant", "tool", "text", "function", "string", "number", "integer"}
    | {"boolean", "object", "array", "null"}
)
_KEYS = ("role", "content", "name", "type", "function", "tool_calls", "tool_call_id", "arguments")
"""Those that nearly every message has."""
# `surely_longer` counts a text in pieces; joined, they are at most this many tokens fewer.
_PIECE_CHARS = 16_384
_TAIL_CHARS = 256
NO_VALUES: Mapping[str, Any] = {}
_PIECE_SLACK = 64
# Of a library's panic (a BaseException) a refusal is made; these are not the library's.
NOT_A_PANIC = (MemoryError, KeyboardInterrupt, SystemExit)


class ControlTokens:
    """The tokens only a template may write, and the search for them in callers' text."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self.tokens = tokens
        contents = sorted((t.content for t in tokens.values()), key=len, reverse=True)
        words = [t.content for t in tokens.values() if t.single_word]
        free = [t.content for t in tokens.values() if not t.single_word]
        self._whole = re.compile(rf"{any_of(free)}|(?<!\w){any_of(words)}(?!\w)")
        # Takes the first character only, so that overlapping ones are found too: breaking one must
        # not leave another whole. Words of their own (single_word) are marked wherever they stand.
        rests: dict[str, list[str]] = {}
        for content in contents:
            rests.setdefault(content[0], []).append(content[1:])
        starts = (f"{re.escape(first)}(?={any_of(rest)})" for first, rest in rests.items())
        self._starts = re.compile("|".join(starts) or NOTHING)
        self._heads = {content[:n] for content in contents for n in range(1, len(content))}
        self._tails = {content[n:] for content in contents for n in range(1, len(content))}
        self._first_chars = _char_of(content[0] for content in contents)
        self._last_chars = _char_of(content[-1] for content in contents)
        self._joined = "\0".join(contents)
        self._longest = max(map(len, contents), default=0)
        nonce = str(int.from_bytes(os.urandom(12), "big"))
        self._mark = f"\ue0f0{nonce}:{{}}\ue0f1"
        # As it is, or as `tojson(ensure_ascii=true)` writes it.
        self._marks = re.compile(rf"(?:\ue0f0|\\ue0f0){nonce}:([0-9]+)(?:\ue0f1|\\ue0f1)")
        self._names = {t.content: f"\ue0f2{nonce}:{i}\ue0f3" for i, t in tokens.items()}
        # One that is matched after normalising can be written in ways the search does not know.
        self.must_count = any(token.normalized for token in tokens.values())
        self._plain_keys = {key for key in _KEYS if self._guard_key(key) == key}

    def guard(self, text: str) -> str:
        """The text with marks wherever it holds, or could complete, a control token; mostly just
        the text."""
        at = {match.start() for match in self._starts.finditer(text)}
        core = text.strip()
        start, end = text.find(core), text.find(core) + len(core)
        lengths = range(1, min(self._longest, len(core) + 1))
        if self._first_chars.search(core, len(core) - self._longest):
            at.update(end - n for n in lengths if text[end - n : end] in self._heads)
        if self._last_chars.search(core, 0, self._longest) and any(
            text[start : start + n] in self._tails for n in lengths
        ):
            at.add(start)
        if core and len(core) < self._longest and core in self._joined:
            at.add(start)
        return self._marked(text, at)

    def guard_all(self, value: Any, key: str = "") -> Any:
        """Every text in a message or a tool: values as `guard`, keys only where they hold a whole
        token, since templates ask for keys by name."""
        if isinstance(value, str):
            is_word = key in ("role", "type") and value in _KEYWORDS
            return value if is_word else self.guard(value)
        if isinstance(value, Mapping):
            plain = self._plain_keys
            return {
                name if name in plain else self._guard_key(name): self.guard_all(v, name)
                for name, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard_all(item, key) for item in value]
        return value

    def _guard_key(self, key: str) -> str:
        return self._marked(key, {match.start() for match in self._starts.finditer(key)})

    def _marked(self, text: str, at: set[int]) -> str:
        parts: list[str] = []
        done = 0
        for i in sorted(at):
            parts += [text[done:i], self._mark.format(ord(text[i]))]
            done = i + 1
        return "".join([*parts, text[done:]]) if at else text

    def is_marked(self, text: str) -> bool:
        """Was anything guarded that is still in this text?"""
        return self._marks.search(text) is not None

    def num_whole(self, text: str) -> int:
        """How many control tokens a rendered text holds."""
        return len(self._whole.findall(text))

    def name_of(self, token: AddedToken) -> str:
        """The secret name the second tokenizer knows this token by."""
        return self._names[token.content]

    def spell(self, rendered: str) -> str:
        """A rendered text as the second tokenizer reads it."""
        named = self._whole.sub(lambda match: self._names[match.group()], rendered)
        return self._marks.sub(lambda match: chr(int(match.group(1))), named)


def _char_of(chars: Iterable[str]) -> re.Pattern[str]:
    """Any of these characters."""
    return re.compile("|".join(map(re.escape, sorted(set(chars)))) or NOTHING)


class TextCodec:
    """Tokenizer, chat template and stop tokens of one model revision. Used by one thread.

    `loading` is around what takes as long as reading the files again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateRefused | None,
        stop_token_ids: Sequence[int],
        named_tokens: Mapping[str, str],
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._literal: Tokenizer | None = None
        self._loading = loading
        self.stop_token_ids = list(stop_token_ids)
        control = set(named_tokens.values())
        self._control = ControlTokens(
            {
                token_id: token
                for token_id, token in tokenizer.get_added_tokens_decoder().items()
                if token.content
                and (token.special or token.content in control or token_id in stop_token_ids)
            }
        )

    def facts(self) -> TextFacts:
        """What the gateway keeps. Raises ValueError for files that nobody can work with."""
        template = self._template
        added = self._tokenizer.get_added_tokens_decoder().items()
        return TextFacts(
            stop_token_ids=self.stop_token_ids,
            special_ids={token.content: i for i, token in added if token.special},
            template=template.source if isinstance(template, ChatTemplate) else "",
            wants_text=isinstance(template, ChatTemplate) and wants_text(_sampler(template)),
            pieces=read_pieces(self._tokenizer),
            variables=template.variables() if isinstance(template, ChatTemplate) else [],
        )

    def encode_prompt(self, text: str, is_bare: bool = False) -> list[int]:
        """A completion's prompt, with the tokens the tokenizer itself puts around a text, unless
        `is_bare`.

        Raises ValueError where the tokenizer fails on it.
        """
        return _encode(self._tokenizer, text, add_special_tokens=not is_bare)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        check_text: Callable[[str], None] = lambda _text: None,
        values: Mapping[str, Any] = NO_VALUES,
        closes: tuple[str, str] | None = None,
    ) -> tuple[list[int], str]:
        """Messages through the template: token ids, and how the text ends. `values`: more of the
        caller's for the template; `closes`: marks of reasoning, of which an empty pair is to stand
        at the end.

        Raises TemplateRefused, ValueError.
        """
        if self._template is None:
            raise TemplateRefused("the model has no chat template: use /v1/completions")
        if isinstance(self._template, TemplateRefused):
            raise TemplateRefused(str(self._template))
        rendered = self._template.render(
            self._control.guard_all(messages),
            continue_final_message,
            tools=self._control.guard_all(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **self._guarded(values),
        )
        if closes is not None:
            rendered += _closed(rendered, *closes)
        check_text(rendered)
        tail = rendered[-_TAIL_CHARS:]
        if not self._control.is_marked(rendered):
            ids = _encode(self._tokenizer, rendered, add_special_tokens=False)
            if not self._control.must_count:
                return ids, tail
            num_control = sum(token_id in self._control.tokens for token_id in ids)
            if num_control <= self._control.num_whole(rendered):
                return ids, tail
        spelled = self._control.spell(rendered)
        ids = _encode(self._literal_tokenizer(), spelled, add_special_tokens=False)
        return ids, tail

    def _guarded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Words that templates compare with stay as they are."""
        return {
            name: value if value in EFFORTS else self._control.guard_all(value)
            for name, value in values.items()
        }

    def encode_literal(self, text: str) -> list[int]:
        """A text in which nothing is a control token, as in a chat. Raises ValueError."""
        guarded = self._control.spell(self._control.guard(text))
        return _encode(self._literal_tokenizer(), guarded, add_special_tokens=False)

    def surely_longer(self, texts: Iterable[str], num_tokens: int) -> bool:
        """Whether these texts are more tokens than that, found without reading much further.

        False also where only the whole prompt would tell. Raises ValueError.
        """
        counted = 0
        for text in texts:
            for at in range(0, len(text), _PIECE_CHARS):
                piece = text[at : at + _PIECE_CHARS]
                counted += len(_encode(self._tokenizer, piece, False)) - _PIECE_SLACK
                if counted > num_tokens:
                    return True
        return False

    def _literal_tokenizer(self) -> Tokenizer:
        if self._literal is None:
            with self._loading():
                self._literal = _renamed(self._tokenizer, self._control)
        return self._literal


def _closed(rendered: str, open_mark: str, close_mark: str) -> str:
    """What ends the reasoning of a prompt that may have begun it."""
    has_begun = rendered.rstrip().endswith(open_mark)
    begin = "" if has_begun else open_mark
    return f"{begin}\n\n{close_mark}\n\n"


def _sampler(template: ChatTemplate) -> Callable[[list[dict[str, Any]]], str]:
    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return template.render(messages)
        except TemplateRefused as error:
            raise ValueError(str(error)) from error

    return render


def load_codec(
    model_dir: Path, loading: Callable[[], AbstractContextManager[None]] = nullcontext
) -> TextCodec:
    """Read a model's files. Raises OSError or ValueError where they are no good.

    A template that does not compile leaves a model that completes but cannot chat.
    """
    tokenizer = read_tokenizer((model_dir / TOKENIZER_FILE).read_bytes())
    named = special_tokens(model_dir)
    template: ChatTemplate | TemplateRefused | None
    try:
        template = load_template(model_dir)
    except TemplateRefused as error:
        template = error
    ends = _stop_token_ids(model_dir, tokenizer, named)
    return TextCodec(tokenizer, template, ends, named, loading)


def _stop_token_ids(model_dir: Path, tokenizer: Tokenizer, named: Mapping[str, str]) -> list[int]:
    """Where `generate` of transformers finds them; the tokenizer's own end token as last resort:
    a small model may have been saved with the ids of a large one, which are none of its rows."""
    config = read_json(model_dir / "config.json")
    inner = config.get("text_config")
    text_config = inner if isinstance(inner, dict) else {}
    said = (place.get("vocab_size") for place in (config, text_config))
    num_rows = next((rows for rows in said if isinstance(rows, int)), MAX_TOKENS)
    for place in [read_json(model_dir / "generation_config.json"), config, text_config]:
        value = place.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = [i for i in ids if isinstance(i, int) and 0 <= i < min(num_rows, MAX_TOKENS)]
        if found:
            return found
    end = tokenizer.token_to_id(named.get("eos_token", ""))
    return [] if end is None else [end]


def _renamed(tokenizer: Tokenizer, control: ControlTokens) -> Tokenizer:
    """The same tokenizer with its control tokens under their secret names.

    Raises ValueError where the result would not give the same ids: better no answer than one that
    lets a caller write control tokens.
    """
    document: dict[str, Any] = msgspec.json.decode(tokenizer.to_str())
    model = document["model"]
    for entry in document["added_tokens"]:
        token = control.tokens.get(entry["id"])
        if token is not None:
            entry["content"] = control.name_of(token)
            entry["normalized"] = False
    contents = {token.content for token in control.tokens.values()}
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if contents.isdisjoint(_parts(m))]
    vocab = model["vocab"]
    for token_id, token in control.tokens.items():
        name = control.name_of(token)
        if isinstance(vocab, dict):
            vocab.pop(token.content, None)
            vocab[name] = token_id
        elif token_id < len(vocab):
            vocab[token_id][0] = name
        if model.get("unk_token") == token.content:
            model["unk_token"] = name
    document["post_processor"] = None
    renamed = read_tokenizer(msgspec.json.encode(document))
    for token_id, token in control.tokens.items():
        if renamed.token_to_id(control.name_of(token)) != token_id:
            raise ValueError(
                f"control token {token.content!r} of this tokenizer cannot be kept out of user text"
            )
    return renamed


def read_tokenizer(raw: bytes) -> Tokenizer:
    """The library raises bare Exceptions and panics, nothing finer: these two functions are the
    boundary."""
    try:
        return Tokenizer.from_buffer(raw)
    except NOT_A_PANIC:
        raise
    except BaseException as error:
        raise ValueError(f"unusable tokenizer: {error}") from error


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        # Unlike `encode` it makes no offsets.
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
    except NOT_A_PANIC:
        raise
    except BaseException as error:
        raise ValueError(f"the tokenizer cannot encode this text: {error}") from error
    return ids


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    """Both sides of a BPE merge, and what they make."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def any_of(texts: Sequence[str]) -> str:
    """A pattern that matches the longest of these texts, and NOTHING where there are none.

    Shared beginnings are written once: a plain alternation of 256 control tokens tries them all at
    every "<", which takes seconds for a message full of them.
    """
    if not texts:
        return NOTHING
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text)
    can_end = by_first.pop("", None) is not None
    branches = []
    for group in by_first.values():
        low, high = min(group), max(group)
        pairs = enumerate(zip(low, high, strict=False))
        num_shared = next((n for n, (a, b) in pairs if a != b), len(low))
        rests = [text[num_shared:] for text in group]
        branches.append(re.escape(low[:num_shared]) + (any_of(rests) if any(rests) else ""))
    pattern = "(?:" + "|".join(branches) + ")"
    return pattern + "?" if can_end and branches else pattern
