"""The encoder families that are hosted: their architectures, their positions, what they cannot do.

A folder with a bare encoder (`BertModel`) embeds; with a sequence classifier on top
(`BertForSequenceClassification`) it classifies, and with one label it ranks pairs. A checkpoint
with the head it was trained with (`BertForMaskedLM`) embeds only where sentence-transformers' files
say how; its head is left out. Everything else of these families is refused here, or goes the way of
the generating models where it is a causal one.

Knows names and configurations, builds nothing (`encoder_model.py` does).
"""

from collections.abc import Sequence
from typing import Any

from engine.encoders import FAMILIES
from engine.errors import RegistrationRefused
from engine.pack import Task

MODULES_NAME = "modules.json"
# Heads that a base model is left without: masked words, next sentences.
_PRETRAINING = ("ForMaskedLM", "ForPreTraining", "LMHeadModel")


def encoder_task(model_type: str, architectures: Sequence[str], has_modules: bool) -> Task | None:
    """What the folder is for; None: it is no encoder's, and the other families should look at it.

    `has_modules`: whether sentence-transformers' files are there. Raises RegistrationRefused for
    an encoder that cannot be hosted.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        return None
    names = list(architectures) or [f"{family.stem}Model"]
    if any(name.endswith("ForCausalLM") for name in names):
        return None
    if f"{family.stem}Model" in names:
        return "embed"
    if f"{family.stem}ForSequenceClassification" in names:
        return "classify"
    if any(name.startswith(family.stem) and name.endswith(_PRETRAINING) for name in names):
        if has_modules:
            return "embed"
        raise RegistrationRefused(
            "unknown_family",
            f"the checkpoint contains a {', '.join(names)}, a masked language model; it can only "
            f"be hosted as an embedding model, with a {MODULES_NAME} and a pooling configuration: "
            "save it with sentence-transformers",
        )
    raise RegistrationRefused(
        "unknown_family",
        f"the checkpoint contains a {', '.join(names)}; supported in this family are "
        f"{family.stem}Model (embedding) and {family.stem}ForSequenceClassification "
        "(classification, reranking)",
    )


def is_encoder(config: Any) -> bool:
    """Whether `source.load_config` let the configuration pass as an encoder's."""
    names = getattr(config, "architectures", None) or []
    return config.model_type in FAMILIES and not any(name.endswith("ForCausalLM") for name in names)


def check_encoder(config: Any) -> None:
    """Raises RegistrationRefused for options of these families that are not supported."""

    def refuse(why: str) -> RegistrationRefused:
        family = config.model_type
        return RegistrationRefused(
            "unknown_family", f"model type {family!r} is not supported: {why}"
        )

    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise refuse("it is configured as a decoder (is_decoder, add_cross_attention)")
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise refuse(f"it has position embeddings of type {kind}")
    for name in ("max_position_embeddings", "vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RegistrationRefused("bad_config", f"the configuration has no valid {name}")
    if longest_input(config) < 1:
        raise RegistrationRefused(
            "bad_config",
            f"max_position_embeddings {config.max_position_embeddings} is too small for "
            f"pad_token_id {config.pad_token_id}: no positions are left for tokens",
        )


def longest_input(config: Any) -> int:
    """Tokens of one input, special ones included, that the model has positions for."""
    positions = int(config.max_position_embeddings)
    if not FAMILIES[config.model_type].positions_from_pad:
        return positions
    pad = config.pad_token_id
    if not isinstance(pad, int) or pad < 0:
        raise RegistrationRefused("bad_config", "the configuration has no pad_token_id")
    return positions - pad - 1


def num_segments(config: Any) -> int:
    """Kinds of segment the model tells apart; 0 where it knows none."""
    return int(getattr(config, "type_vocab_size", 0) or 0)
