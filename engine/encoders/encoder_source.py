"""What sentence-transformers' files in a folder say of an encoder's rows: pooling, length, norm.

    modules.json                   the modules a text passes: Transformer, Pooling, Normalize
    <pooling>/config.json          which poolings; several are put side by side
    sentence_bert_config.json      max_seq_length, do_lower_case

A module or an option that is not one of these would change the rows, so it is refused, never left
out: a Dense layer, a Transformer in a folder of its own. Without `modules.json` the rows are the
mean of the hidden states, brought to length 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.encoders.encoder_families import MODULES_NAME
from engine.encoders.encoder_model import POOLINGS
from engine.errors import RegistrationRefused

LENGTH_NAME = "sentence_bert_config.json"
MAX_FILE_BYTES = 1 << 20

# Pooling options by name, in the order in which sentence-transformers puts their vectors.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
# Its newer files name one, or several in a list.
_NAMES = {
    "lasttoken": "last",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
}


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """`max_tokens`: of one input, where the files bound it."""

    pooling: str = "mean"
    normalize: bool = True
    max_tokens: int | None = None


def read_encoder_files(folder: Path) -> EncoderFiles:
    """Raises RegistrationRefused("unknown_pooling") for what cannot be followed."""
    max_tokens = _max_tokens(folder)
    if not (folder / MODULES_NAME).is_file():
        return EncoderFiles(max_tokens=max_tokens)
    pooling = ""
    normalize = False
    for number, module in enumerate(_modules(folder)):
        kind, path = str(module.get("type", "")), str(module.get("path", ""))
        match kind.rpartition(".")[2]:
            case "Transformer" if not number and path in ("", "."):
                pass
            case "Pooling" if not pooling and not normalize:
                pooling = _pooling(folder, path)
            case "Normalize" if pooling:
                normalize = True
            case _:
                raise _refused(
                    f"{MODULES_NAME} has a module {kind or '?'} (number {number}, path {path!r}), "
                    "and only a Transformer in the folder itself, one Pooling and Normalize can "
                    "be hosted, in this order"
                )
    if not pooling:
        raise _refused(f"{MODULES_NAME} names no Pooling: it says not how texts become vectors")
    return EncoderFiles(pooling, normalize, max_tokens)


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = _json(folder / MODULES_NAME)
    if not isinstance(modules, list) or not all(isinstance(entry, dict) for entry in modules):
        raise _refused(f"{MODULES_NAME} is not a list of modules; download the model again")
    return modules


def _pooling(folder: Path, name: str) -> str:
    # A path with another separator in it could point out of the folder.
    if Path(name).name != name or name in ("", ".", ".."):
        raise _refused(f"{MODULES_NAME} has its Pooling in {name!r}, not in a folder beside it")
    config = _json(folder / name / "config.json")
    if not isinstance(config, dict):
        raise _refused(f"{name}/config.json is not a JSON object; download the model again")
    told = config.get("pooling_mode")
    if told is not None:
        several = told if isinstance(told, list) else str(told).split("+")
        kinds = [_NAMES.get(str(one), str(one)) for one in several]
    else:
        kinds = [kind for option, kind in _MODES.items() if config.get(option)]
        strange = [
            option
            for option, on in config.items()
            if option.startswith("pooling_mode_") and on and option not in _MODES
        ]
        kinds += strange
    unknown = [kind for kind in kinds if kind not in POOLINGS]
    if unknown or not kinds:
        raise _refused(
            f"{name}/config.json asks for the pooling {', '.join(unknown) or '(none)'}; "
            f"{', '.join(POOLINGS)} are known"
        )
    return "+".join(kinds)


def _max_tokens(folder: Path) -> int | None:
    if not (folder / LENGTH_NAME).is_file():
        return None
    config = _json(folder / LENGTH_NAME)
    if not isinstance(config, dict):
        raise _refused(f"{LENGTH_NAME} is not a JSON object; download the model again")
    if config.get("do_lower_case") and not _lowers_by_itself(folder):
        raise _refused(
            f"{LENGTH_NAME} has texts lower-cased before they are tokenized (do_lower_case); put a "
            "Lowercase normalizer into tokenizer.json instead"
        )
    longest = config.get("max_seq_length")
    if longest is None:
        return None
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise _refused(f"{LENGTH_NAME} has max_seq_length {longest!r}; a positive number is needed")
    return longest


def _lowers_by_itself(folder: Path) -> bool:
    """Whether the tokenizer's own normalizer makes no difference between cases."""
    tokenizer = _json(folder / "tokenizer.json", limit=None)
    normalizer = tokenizer.get("normalizer") if isinstance(tokenizer, dict) else None
    if not isinstance(normalizer, dict):
        return False
    parts = normalizer.get("normalizers") or [normalizer]
    return any(
        isinstance(part, dict)
        and (part.get("type") == "Lowercase" or part.get("lowercase") is True)
        for part in parts
    )


def _json(path: Path, limit: int | None = MAX_FILE_BYTES) -> Any:
    try:
        if limit is not None and path.stat().st_size > limit:
            raise _refused(f"{path} has more than {limit} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _refused(
            f"{path} cannot be read as JSON ({error}); download the model again"
        ) from error


def _refused(why: str) -> RegistrationRefused:
    return RegistrationRefused("unknown_pooling", why)
