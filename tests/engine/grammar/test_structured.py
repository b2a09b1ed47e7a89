"""Constraints: what is compiled, what masks allow, what is refused and in which words."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from engine.errors import ConstraintBroken, ConstraintRefused
from engine.grammar.structured import MAX_CONSTRAINT_CHARS, Compiler, Grammar, Matcher
from engine.protocol import Constraint

DEMO = Path(__file__).resolve().parents[3] / "gateway/demo_models/python/tokenizer.json"
VOCAB = 2112  # the logits are wider than the 2048 tokens
END, EOS = 5, 1


@cache
def compiler() -> Compiler:
    return Compiler(DEMO, VOCAB, (EOS, END))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO))


def token_id(text: str) -> int:
    found = tokenizer().token_to_id(text)
    assert found is not None
    return int(found)


def compiled(kind: Any, text: str = "") -> Grammar:
    return compiler().compile(Constraint(kind, text))


def schema(value: Any) -> Grammar:
    return compiled("json_schema", json.dumps(value))


def allowed(matcher: Matcher, vocab: int = VOCAB) -> npt.NDArray[np.int64]:
    row = bytearray(-(-vocab // 32) * 4)
    matcher.mask_into(memoryview(row))
    return np.flatnonzero(np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little"))


@cache
def short_ids() -> npt.NDArray[np.int64]:
    texts = ((token, str(tokenizer().id_to_token(token))) for token in range(2048))
    return np.array([token for token, text in texts if len(text) == 1])


def walk(grammar: Grammar, seed: int, budget: int = 150) -> tuple[str, bool]:
    """A random output, ended as soon as it may end; and whether it came to an end."""
    generator = np.random.default_rng(seed)
    matcher, output = Matcher(grammar), list[int]()
    while len(output) < budget:
        choices = allowed(matcher)
        assert len(choices), "a mask without a token"
        if END in choices:
            return tokenizer().decode(output, skip_special_tokens=False), True
        # Mostly a token of one character, so that strings and numbers end.
        short = np.intersect1d(choices, short_ids())
        pool = short if len(short) and generator.random() < 0.8 else choices
        token = int(generator.choice(pool))
        matcher.accept(token)
        output.append(token)
    return tokenizer().decode(output), False


def is_point(value: Any) -> bool:
    return set(value) == {"x", "y"} and all(isinstance(value[key], int) for key in "xy")


CASES: dict[str, tuple[Grammar | Callable[[], Grammar], Callable[[str], bool]]] = {
    "object": (
        lambda: schema(
            {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        ),
        lambda text: is_point(json.loads(text)),
    ),
    "enum": (lambda: schema({"enum": ["a", 2, None]}), lambda t: json.loads(t) in ("a", 2, None)),
    "array": (
        lambda: schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}),
        lambda text: (
            len(json.loads(text)) <= 3 and all(v in (True, False) for v in json.loads(text))
        ),
    ),
    "range": (
        lambda: schema({"type": "integer", "minimum": -7, "maximum": 1234}),
        lambda text: -7 <= json.loads(text) <= 1234,
    ),
    "pattern": (
        lambda: schema({"type": "string", "pattern": "^[a-f]{2,4}-\\d+$", "maxLength": 9}),
        lambda text: re.fullmatch(r"[a-f]{2,4}-[0-9]+", json.loads(text)) is not None,
    ),
    "reference": (
        lambda: schema(
            {
                "$defs": {
                    "n": {
                        "type": "object",
                        "properties": {
                            "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
                        },
                        "required": ["next"],
                        "additionalProperties": False,
                    }
                },
                "$ref": "#/$defs/n",
            }
        ),
        lambda text: set(json.loads(text)) == {"next"},
    ),
    "any object": (
        lambda: compiled("json_object"),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": (
        lambda: compiled("regex", "(ab|cd)+[0-9]{3}"),
        lambda text: re.fullmatch("(ab|cd)+[0-9]{3}", text) is not None,
    ),
    "grammar": (
        lambda: compiled("grammar", 'start: "f(" num ("," num)* ")"\nnum: /[0-9]{1,3}/'),
        lambda text: re.fullmatch(r"f\(\d{1,3}(,\d{1,3})*\)", text) is not None,
    ),
    "schema in a grammar": (
        lambda: compiled(
            "grammar", 'start: "<call>" obj "</call>"\nobj: %json {"enum": [{"a": 1}]}'
        ),
        lambda text: json.loads(text[6:-7]) == {"a": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_finished_output_satisfies_the_constraint(name: str) -> None:
    make, holds = CASES[name]
    grammar = make() if callable(make) else make
    outputs = [walk(grammar, seed) for seed in range(12)]
    finished = [text for text, is_finished in outputs if is_finished]
    assert len(finished) >= 4
    assert all(holds(text) for text in finished), finished


def test_a_mask_is_exactly_what_the_constraint_allows() -> None:
    ids = allowed(Matcher(compiled("regex", "(def|d|x)y?")))
    assert {tokenizer().id_to_token(int(token)) for token in ids} <= {"d", "de", "def", "x", "dy"}
    assert {"d", "x"} <= {tokenizer().id_to_token(int(token)) for token in ids}


def test_special_tokens_and_those_past_the_tokenizer_are_never_allowed() -> None:
    ids = allowed(Matcher(compiled("regex", "(.|\n)+")))
    assert len(ids) > 1900
    assert not set(ids.tolist()) & {0, 1, 2, 3, 4, 5}
    assert ids.max() < 2048


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema"])
def test_text_that_looks_like_a_control_token_is_written_as_text(kind: Any) -> None:
    text = "<|end|>"
    constraint = {"regex": re.escape(text), "json_schema": json.dumps({"const": text})}
    output, is_finished = walk(compiled(kind, constraint.get(kind, f'start: "{text}"')), 1)
    assert is_finished
    assert output == (json.dumps(text) if kind == "json_schema" else text)


def test_a_grammar_may_name_a_control_token_by_its_id() -> None:
    matcher = Matcher(compiled("grammar", 'start: <[3]> "x"'))
    assert allowed(matcher).tolist() == [3]
    matcher.accept(3)
    assert allowed(matcher).tolist() == [token_id("x")]


def test_an_output_is_finished_when_only_an_end_may_follow() -> None:
    matcher = Matcher(schema({"enum": ["ab", "abc"]}))
    for token in tokenizer().encode('"ab', add_special_tokens=False).ids:
        assert not matcher.finished
        matcher.accept(token)
    matcher.accept(token_id('"'))
    assert matcher.finished
    assert set(allowed(matcher).tolist()) <= {EOS, END}
    open_end = Matcher(compiled("regex", "a+"))
    open_end.accept(token_id("a"))
    assert not open_end.finished
    assert {EOS, END} <= set(allowed(open_end).tolist())
    open_end.accept(END)
    assert open_end.finished


def test_json_is_spaced_as_json_dumps_writes_it() -> None:
    value = {"a": [1, 2], "b": "c d"}
    text = json.dumps(value)
    grammar = schema({"const": value})
    matcher = Matcher(grammar, tokenizer().encode(text, add_special_tokens=False).ids)
    assert matcher.finished
    for other in (text.replace(", ", ","), text.replace(",", " ,"), f" {text}", f"\n{text}"):
        with pytest.raises(ConstraintBroken):
            Matcher(grammar, tokenizer().encode(other, add_special_tokens=False).ids)


def test_a_matcher_goes_on_from_an_output() -> None:
    grammar = compiled("json_object")
    output = tokenizer().encode('{"a": tr', add_special_tokens=False).ids
    straight = Matcher(grammar)
    for token in output:
        straight.accept(token)
    assert allowed(Matcher(grammar, output)).tolist() == allowed(straight).tolist()


def test_a_token_it_does_not_allow_breaks_one_matcher_and_no_other() -> None:
    grammar = compiled("json_object")
    matcher, other = Matcher(grammar), Matcher(grammar)
    before = allowed(other).tolist()
    with pytest.raises(ConstraintBroken):
        matcher.accept(token_id("x"))
    assert allowed(other).tolist() == before
    assert grammar.worn


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", "{", "EOF"),
        ("json_schema", "[1]", "object"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {"type": "null"}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "null"}]}', "nsatisfiable"),
        ("json_schema", '{"$ref": "#"}', "."),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "example.com"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "recursion"),
        ("json_schema", " " * (MAX_CONSTRAINT_CHARS + 1), "characters"),
        ("regex", "(", "."),
        ("regex", "a(?=b)", "."),
        ("regex", r"(a)\1", "."),
        ("grammar", "start: missing", "missing"),
        ("grammar", "no grammar at all", "."),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    ],
)
def test_what_cannot_be_held_is_refused(kind: Any, text: str, reason: str) -> None:
    with pytest.raises(ConstraintRefused, match=reason):
        compiled(kind, text)


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(ConstraintRefused, match="needs an end token"):
        Compiler(DEMO, VOCAB, ())


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "none"}}', "\x00\xff"])
def test_an_unknown_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConstraintRefused, match="tokenizer"):
        Compiler(path, VOCAB, (1,))
    with pytest.raises(ConstraintRefused, match="tokenizer"):
        Compiler(tmp_path / "missing.json", VOCAB, (1,))


def byte_fallback_tokenizer(path: Path) -> Tokenizer:
    """Of the sentencepiece kind: a mark for spaces, bytes as tokens of their own."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", '"', "{", "}", ":", ",", "a", "b", "\u2581a", "\u2581b", "\u00e9"]
    made = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("\u2581", "a"), ("\u2581", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    made.save(str(path))
    return made


def test_byte_fallback_tokenizers_write_every_character(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    made = byte_fallback_tokenizer(path)
    grammar = Compiler(path, 300, (2,)).compile(
        Constraint("json_schema", '{"const": {"a": "b \u00fc\u00e9"}}')
    )
    matcher, output = Matcher(grammar), list[int]()
    while not matcher.finished:
        token = int(allowed(matcher, 300)[-1])
        matcher.accept(token)
        output.append(token)
    assert json.loads(made.decode(output)) == {"a": "b \u00fc\u00e9"}


def test_more_tokens_than_logits_are_no_harm() -> None:
    narrow = Compiler(DEMO, 1000, (EOS,)).compile(Constraint("regex", "[a-f]+"))
    assert narrow.mask_bytes >= 2048 // 8
    assert token_id("a") in allowed(Matcher(narrow), 2048)
