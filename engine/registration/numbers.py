"""Numbers in a model's small files that nobody can mean: refused before anything is computed.

A stranger's configuration may say NaN, infinity, an end token of thirty digits or a temperature of
-1. Python's JSON takes all of them, transformers most, and what reads them later is a dispatcher or
a kernel. Token ids have to be numbers of tokens; what is sampled by default has to lie in its
range; positions have to be scaled by finite, positive numbers.

Ids beyond the embedding's rows are taken, here and in the tokenizer: small models are saved with
the end token of the large one, and many tokenizers have a `[PAD]` that no row was made for. No
such token is ever sampled, and a request that has one is refused (gateway/text/codecs.py).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import RegistrationRefused
from engine.registration.blueprint import Blueprint
from engine.registration.source import CONFIG_NAME, read_json
from engine.registration.wrapper import text_section

GENERATION_NAME = "generation_config.json"
_TOKEN_IDS = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "bad_words_ids",
    }
)
_MAX_LENGTH = (1 << 31) - 1
_RANGES = {
    "temperature": (0.0, 1000.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, float(_MAX_LENGTH)),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1000.0),
    "max_length": (0.0, float(_MAX_LENGTH)),
    "max_new_tokens": (0.0, float(_MAX_LENGTH)),
    "min_length": (0.0, float(_MAX_LENGTH)),
    "min_new_tokens": (0.0, float(_MAX_LENGTH)),
}
_ROPE_NAMES = ("rope_parameters", "rope_scaling")
_MAX_SCALE = 1e15


def check_numbers(folder: Path, plan: Blueprint) -> None:
    """Raises RegistrationRefused."""
    for name in (CONFIG_NAME, GENERATION_NAME):
        if not (folder / name).is_file():
            continue
        content = read_json(folder / name, "bad_config", dict)
        for path, number in _numbers(content):
            # Integers of any length are numbers to JSON, and to nothing behind it.
            if not (math.isfinite(number) if isinstance(number, float) else abs(number) < 1 << 63):
                raise _refused(name, path, number, "no number that can be computed with")
        for part in (content, text_section(content)):
            if plan.encoder is None:  # encoders neither begin nor end, and are saved with any ids
                _check_ids(name, part)
            for rope in _ROPE_NAMES:
                for path, number in _numbers(part.get(rope), rope):
                    if not 0 <= number <= _MAX_SCALE:
                        raise _refused(name, path, number, "no scale of positions")
        if name == GENERATION_NAME:
            for path, (low, high) in _RANGES.items():
                value = content.get(path)
                if isinstance(value, int | float) and not low <= value <= high:
                    raise _refused(name, path, value, f"not between {low:g} and {high:g}")


def _check_ids(name: str, content: Mapping[str, Any]) -> None:
    for key in _TOKEN_IDS & content.keys():
        for path, number in _numbers(content[key], key):
            # Older configurations say -1 for "none".
            if number != int(number) or not -1 <= number <= _MAX_LENGTH:
                raise _refused(name, path, number, "no token id")


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, int | float]]:
    """All numbers in a JSON value, with where they are."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _refused(name: str, path: str, number: float, what: str) -> RegistrationRefused:
    return RegistrationRefused(
        "bad_config", f"{path} in {name} is {_short(number)}: {what}; correct the file"
    )


def _short(number: float) -> str:
    if isinstance(number, int) and number.bit_length() > 64:
        return f"an integer of {number.bit_length()} bits"
    return repr(number)
