"""What an encoder's folder asks for: its tensors on meta, its rows, its longest input.

The encoders' sibling of `blueprint.py`; `plan_model` chooses between them, and between the two ways
to host a multimodal wrapper. A head that a base model
does not have (masked words, an unused pooler) is named as what a checkpoint may hold beside the
model's tensors, as transformers drops it; everything else that is missing or left over is refused
like any model's (`checkpoint.py`). What sentence-transformers' files say of the rows:

    modules.json                   the modules a text passes: Transformer, Pooling, Normalize
    <pooling>/config.json          which poolings; several are put side by side
    sentence_bert_config.json      max_seq_length, do_lower_case

A module or an option that is not one of these would change the rows, so it is refused, never left
out: a Dense layer, a Transformer in a folder of its own. Without `modules.json` the rows are the
mean of the hidden states, brought to length 1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.encoders import POOLINGS, build_encoder
from engine.errors import RegistrationRefused
from engine.modules.text_part import is_wrapper
from engine.pack import EncoderRecord, Task
from engine.registration.blueprint import Blueprint, blueprint, check_family
from engine.registration.encoder_families import (
    MODULES_NAME,
    check_encoder,
    encoder_task,
    is_encoder,
    longest_input,
    num_segments,
)
from engine.registration.parity import agrees
from engine.registration.source import Json, read_json

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
# What may lie beside a base model: its pooler, and the heads of BertForMaskedLM and its kin.
_HEADS = (
    r"^(?:\w+\.)?pooler\.",
    r"^cls\.(?:predictions|seq_relationship)\.",
    r"^lm_head\.",
    r"^vocab_(?:transform|layer_norm|projector)\.",
    r"^head\.(?:dense|norm)\.",
    r"^decoder\.(?:weight|bias)$",
)


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
                    f"{MODULES_NAME} has an unsupported module {kind or '?'} (number {number}, "
                    f"path {path!r}); supported are, in this order, a Transformer in the folder "
                    "itself, one Pooling, and Normalize"
                )
    if not pooling:
        raise _refused(
            f"{MODULES_NAME} has no Pooling module, so the pooling of the model is unknown"
        )
    return EncoderFiles(pooling, normalize, max_tokens)


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = _read(folder / MODULES_NAME, list)
    if not all(isinstance(entry, dict) for entry in modules):
        raise _refused(f"{MODULES_NAME} is not a list of modules; download the model again")
    return modules


def _pooling(folder: Path, name: str) -> str:
    # A path with another separator in it could point out of the folder.
    if Path(name).name != name or name in ("", ".", ".."):
        raise _refused(
            f"{MODULES_NAME} has its Pooling in {name!r}: it must be a folder beside the file"
        )
    config = _read(folder / name / "config.json", dict)
    named = config.get("pooling_mode")
    if named is not None:
        several = named if isinstance(named, list) else str(named).split("+")
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
            f"{name}/config.json has the unsupported pooling {', '.join(unknown) or '(none)'}; "
            f"supported are {', '.join(POOLINGS)}"
        )
    return "+".join(kinds)


def _max_tokens(folder: Path) -> int | None:
    if not (folder / LENGTH_NAME).is_file():
        return None
    config = _read(folder / LENGTH_NAME, dict)
    if config.get("do_lower_case") and not _lowers_by_itself(folder):
        raise _refused(
            f"{LENGTH_NAME} lower-cases texts before tokenization (do_lower_case), which is not "
            "supported; put a Lowercase normalizer into tokenizer.json instead"
        )
    longest = config.get("max_seq_length")
    if longest is None:
        return None
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise _refused(
            f"{LENGTH_NAME} has max_seq_length {longest!r}; it must be a positive number"
        )
    return longest


def _lowers_by_itself(folder: Path) -> bool:
    """Whether the tokenizer's own normalizer makes no difference between cases."""
    normalizer = read_json(folder / "tokenizer.json", "unknown_pooling", dict).get("normalizer")
    if not isinstance(normalizer, dict):
        return False
    parts = normalizer.get("normalizers") or [normalizer]
    return any(
        isinstance(part, dict)
        and (part.get("type") == "Lowercase" or part.get("lowercase") is True)
        for part in parts
    )


def _read(path: Path, kind: type[Json]) -> Json:
    return read_json(path, "unknown_pooling", kind, MAX_FILE_BYTES)


def _refused(why: str) -> RegistrationRefused:
    return RegistrationRefused("unknown_pooling", why)


def plan_model(config: Any, folder: Path) -> Blueprint:
    """A generating model's, a multimodal wrapper's or an encoder's. Raises RegistrationRefused."""
    if is_encoder(config):
        return encoder_blueprint(config, folder)
    if not is_wrapper(config):
        return blueprint(config)
    check_family(config.get_text_config())  # before anything is built
    return blueprint(config, as_class=agrees(config))


def encoder_blueprint(config: Any, folder: Path) -> Blueprint:
    """Raises RegistrationRefused for what cannot be hosted."""
    check_encoder(config)
    names = getattr(config, "architectures", None) or []
    task = encoder_task(config.model_type, names, (folder / MODULES_NAME).is_file())
    assert task is not None
    files = read_encoder_files(folder) if task == "embed" else EncoderFiles()
    try:
        with torch.device("meta"):
            skeleton = build_encoder(config, task, torch.float32, "eager")
    except Exception as error:  # modelling code: no contract on its error types
        raise RegistrationRefused(
            "bad_config",
            f"transformers cannot build a {config.model_type!r} from this configuration: "
            f"{type(error).__name__}: {error}",
        ) from error
    if task == "embed":
        _expect_heads(skeleton)
    return Blueprint(
        config=config,
        skeleton=skeleton,
        tensors=dict(skeleton.state_dict()),
        tied={},
        kv_groups=(),
        vocab_size=int(config.vocab_size),
        max_context=min(longest_input(config), files.max_tokens or longest_input(config)),
        task=task,
        encoder=_record(config, task, files),
    )


def _record(config: Any, task: Task, files: EncoderFiles) -> EncoderRecord:
    if task == "embed":
        return EncoderRecord(
            pooling=files.pooling,
            normalize=files.normalize,
            dim=int(config.hidden_size) * len(files.pooling.split("+")),
            segments=num_segments(config),
        )
    names = config.id2label
    labels = tuple(str(names.get(number, f"LABEL_{number}")) for number in range(len(names)))
    return EncoderRecord(
        pooling=str(getattr(config, "classifier_pooling", "cls")),
        normalize=False,
        dim=len(labels),
        labels=labels,
        multi_label=config.problem_type == "multi_label_classification",
        segments=num_segments(config),
    )


def _expect_heads(skeleton: nn.Module) -> None:
    """Let the checkpoint hold what the base model has no use for."""
    known = getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or []
    skeleton._keys_to_ignore_on_load_unexpected = [*known, *_HEADS]  # type: ignore[assignment]
