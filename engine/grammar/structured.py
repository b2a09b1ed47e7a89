"""Structured output: constraints compiled for a model's tokenizer, and a matcher per request.

The only file that knows the library, llguidance; docs/log.md has the measurements behind that
choice. It runs in a process of its own (engine/grammar/child.py), because what
callers send can take any time and any stack in spite of the library's limits; here are those
limits, and what is refused: what the library cannot promise to hold (it names the keyword), what
is too large, what no output could satisfy. A grammar that exhausts its fuel in mid-generation ends
with ConstraintSpent.

Whitespace in JSON is fixed to what json.dumps writes: a model that may write spaces anywhere may
write nothing else. Knows no torch.
"""

import ctypes
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import llguidance

from engine.errors import ConstraintBroken, ConstraintRefused, ConstraintSpent
from engine.protocol import Constraint

# Longer texts are refused before they are parsed. Many functions on offer make long grammars.
MAX_CONSTRAINT_CHARS = 524_288
# Not `u`: the name "\\u0061" would not be known for the schema's "a", and it could come twice. So
# other control characters cannot be written.
_ESCAPES = 'nrbtf\\"'


def _limits() -> llguidance.LLParserLimits:
    """Fuel: some 90 ms of compiling, 4 ms of one row's lexer; memory: some 30 MB a grammar.

    Items of a row are looked through for each that is added, so their number bounds a step's time
    only together with their number in a row: the dearest step found took 90 ms, twice (for the
    token, and for the mask). Ordinary schemas need some 100 of either; 300 optional properties
    need 1,200 in a row (docs/log.md).
    """
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=8_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Grammar:
    """A compiled constraint, shared by the requests that have it.

    They share a lexer whose states are bounded, too: once that bound has been met the grammar is
    `worn` and is compiled anew for later requests.
    """

    def __init__(self, start: llguidance.LLMatcher, mask_bytes: int) -> None:
        self.start = start
        self.mask_bytes = mask_bytes
        self.worn = False
        self.num_matchers = 0


class Compiler:
    """Compiles constraints for one tokenizer. Making one takes 0.7 s at 100k tokens."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_ids: Collection[int]) -> None:
        """vocab_size: columns of the logits; eos_ids: the tokens that may end the output.

        Raises ConstraintRefused if the model has no end or its tokenizer is of an unknown kind.
        """
        if not eos_ids:
            raise ConstraintRefused("structured output needs an end token, and the model has none")
        try:
            text = _without_control_text(tokenizer_json.read_text(encoding="utf-8"))
            self._tokenizer = self._load(text, vocab_size, sorted(eos_ids))
        except (OSError, ValueError, LookupError, TypeError) as error:
            # Of a missing file the client need not know the place.
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConstraintRefused(
                "structured output is not supported with this model's tokenizer: "
                + _in_brief(why or "")
            ) from error
        self.mask_bytes = 4 * -(-self._tokenizer.vocab_size // 32)

    def _load(self, text: str, vocab_size: int, eos_ids: list[int]) -> llguidance.LLTokenizer:
        slices = llguidance.LLTokenizer.json_slices()
        try:
            return llguidance.LLTokenizer(text, vocab_size, eos_ids, slices)
        except ValueError:
            # More tokens than logits: those beyond are never sampled.
            return llguidance.LLTokenizer(text, None, eos_ids, slices)

    def compile(self, constraint: Constraint) -> Grammar:
        """Milliseconds, but for hostile texts. Raises ConstraintRefused."""
        matcher = llguidance.LLMatcher(
            self._tokenizer, _grammar_text(constraint), log_level=0, limits=_limits()
        )
        _refuse_errors(matcher)
        # An empty language, a circle of references and the like show in the first mask only.
        trial = matcher.deep_copy()
        mask = trial.compute_bitmask()
        _refuse_errors(trial)
        if not any(mask):
            raise ConstraintRefused("no output can satisfy the constraint")
        return Grammar(matcher, self.mask_bytes)


class Matcher:
    """Where one request stands in its grammar."""

    def __init__(self, grammar: Grammar, output_ids: Sequence[int] = ()) -> None:
        """output_ids: what was generated before, to go on from. Raises ConstraintBroken."""
        self._grammar = grammar
        grammar.num_matchers += 1
        self._matcher = grammar.start.deep_copy()
        for token in output_ids:
            self.accept(token)

    def mask_into(self, row: memoryview) -> None:
        """Set exactly the bits of the tokens that may come next. Raises ConstraintSpent.

        row: writable bytes, mask_bytes or more; bit t % 32 of 32-bit word t // 32 is token t.
        """
        first = ctypes.c_char.from_buffer(row)
        assert row.nbytes >= self._grammar.mask_bytes
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(first), self._grammar.mask_bytes)
        if self._matcher.is_error():
            raise self._error()

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Raises ConstraintBroken: not allowed, or out of fuel."""
        if not self._matcher.consume_token(token):
            raise self._error()

    def _error(self) -> ConstraintBroken:
        self._grammar.worn = True
        reason = _in_brief(self._matcher.get_error())
        # The library has one error for all; this is what it says of a token of no mask.
        if "satisfy the grammar" in reason:
            return ConstraintBroken(reason)
        return ConstraintSpent(reason, "states" in reason and self._grammar.num_matchers > 1)

    @property
    def finished(self) -> bool:
        """Whether the output is complete: nothing but an end-of-sequence token could follow."""
        return self._matcher.is_stopped()


def _without_control_text(tokenizer_json: str) -> str:
    """The same tokenizer with control tokens renamed to what no text says.

    Where a constraint leaves one text only, the library asks the tokenizer how to write it, and
    would get the control token for a text that merely looks like one.
    """
    tokenizer = json.loads(tokenizer_json)
    renamed = {
        token["content"]: f"\uf8ff{token['id']}\uf8ff"
        for token in tokenizer.get("added_tokens") or ()
        if token["special"]
    }
    for token in tokenizer.get("added_tokens") or ():
        token["content"] = renamed.get(token["content"], token["content"])
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(text, text): n for text, n in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return json.dumps(tokenizer)


def _grammar_text(constraint: Constraint) -> str:
    text = constraint.text
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise ConstraintRefused(
            f"the constraint has {len(text)} characters, more than {MAX_CONSTRAINT_CHARS}"
        )
    try:
        if constraint.kind == "json_object":
            text = '{"type": "object"}'
        if constraint.kind in ("json_object", "json_schema"):
            return llguidance.LLMatcher.grammar_from_json_schema(
                text,
                overrides={
                    "whitespace_flexible": False,
                    "item_separator": ", ",
                    "key_separator": ": ",
                    "json_allowed_escapes": _ESCAPES,
                    "lenient": False,
                    "coerce_one_of": False,
                },
            )
        if constraint.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(text)
        return llguidance.LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        raise ConstraintRefused(_in_brief(str(error))) from error


def _refuse_errors(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ConstraintRefused(_in_brief(matcher.get_error()))


def _in_brief(text: str) -> str:
    """The first line, and what the pattern library says beneath its drawing of the place."""
    first, _, rest = text.strip().partition("\n")
    causes = [line for line in rest.splitlines() if line.startswith("error: ")]
    return " ".join([first[:400], *causes[:1]])[:500] or "it cannot be compiled"
