"""What an encoder's folder asks for: its tensors on meta, its rows, its longest input.

The encoders' sibling of `blueprint.py`; `plan_model` is the door to both. A head that a base model
does not have (masked words, an unused pooler) is named as what a checkpoint may hold beside the
model's tensors, as transformers drops it; everything else that is missing or left over is refused
like any model's (`checkpoint.py`).
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.encoders.encoder_families import (
    MODULES_NAME,
    check_encoder,
    encoder_task,
    is_encoder,
    longest_input,
    num_segments,
)
from engine.encoders.encoder_model import build_encoder
from engine.encoders.encoder_source import EncoderFiles, read_encoder_files
from engine.errors import RegistrationRefused
from engine.packs.blueprint import Blueprint, blueprint
from engine.packs.pack import EncoderRecord, Task

# What may lie beside a base model: its pooler, and the heads of BertForMaskedLM and its kin.
_HEADS = (
    r"^(?:\w+\.)?pooler\.",
    r"^cls\.(?:predictions|seq_relationship)\.",
    r"^lm_head\.",
    r"^vocab_(?:transform|layer_norm|projector)\.",
    r"^head\.(?:dense|norm)\.",
    r"^decoder\.(?:weight|bias)$",
)


def plan_model(config: Any, folder: Path) -> Blueprint:
    """A generating model's or an encoder's. Raises RegistrationRefused."""
    return encoder_blueprint(config, folder) if is_encoder(config) else blueprint(config)


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
