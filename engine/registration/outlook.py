"""Can a model be hosted? What its type says, before any file of it is fetched.

For lists of models on a hub, where there is a type, the names of architectures and tags, and no
config.json. Answers by structure, as `source.py` and `blueprint.py` do, and not by a list of names:

    no        whatever its configuration says: code of its own, pickled weights, an unknown family
              or quantization
    unlikely  the type's default configuration is refused; another one may pass
    likely    nothing speaks against it: its configuration and the parity probe have the last word
    unknown   the hub does not say what it is

An inspection (`main.py --inspect`) reads the configuration and runs the probe.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.errors import RegistrationRefused
from engine.modules.text_part import is_wrapper
from engine.registration.blueprint import check_family
from engine.registration.encoder_families import encoder_task
from engine.registration.hub_models import GGUF, PICKLES, SAFETENSORS, HubModel
from engine.registration.source import check_causal, check_decoder
from engine.registration.tensors import declared_in

Verdict = Literal["likely", "unlikely", "no", "unknown"]
# A hub shows the method and the bits of a quantized checkpoint and keeps the rest to itself.
_USUAL = {"bits": 4, "config_groups": {"group_0": {}}, "quant_algo": "FP8"}


@dataclass(frozen=True, slots=True)
class Outlook:
    """A verdict with its reason: the code and message of a refusal, or what is missing."""

    verdict: Verdict
    code: str = ""
    reason: str = ""


def outlook(model: HubModel) -> Outlook:
    """Fetches nothing; the first look at a type imports its modelling code."""
    if model.custom_code:
        why = "it needs its own modelling code, which is never run"
        return Outlook("no", "custom_code", why)
    if model.format == PICKLES:
        return Outlook("no", "pickle_weights", "it has only pickled weights, which are not opened")
    if model.format == GGUF:
        why = "download one GGUF file into a folder of its own, and inspect that folder"
        return Outlook("unknown", "no_weights", why)
    if not model.model_type:
        return Outlook("unknown", "bad_config", "the hub does not say of which type it is")
    if model.quantization:
        try:
            declared_in({"quantization_config": _USUAL | dict(model.quantization)}, {})
        except RegistrationRefused as refusal:
            return Outlook("no", refusal.code, str(refusal))
    found = _of_family(model.model_type, model.architectures, model.sentences)
    if found.verdict == "likely" and model.format != SAFETENSORS:
        return Outlook("unknown", "no_weights", "the hub does not say that it has safetensors")
    return found


@functools.cache
def _of_family(model_type: str, architectures: tuple[str, ...], sentences: bool) -> Outlook:
    try:
        if encoder_task(model_type, architectures, sentences) is not None:
            return Outlook("likely")
        check_causal("it", model_type, architectures)
    except RegistrationRefused as refusal:
        return Outlook("no", refusal.code, str(refusal))
    config = _default_of(model_type)
    if config is None:
        return Outlook("likely")
    try:
        check_decoder(config)
        check_family(config.get_text_config() if is_wrapper(config) else config)
    except RegistrationRefused as refusal:
        # A field that a default leaves open is no statement about the type.
        is_open = refusal.code == "bad_config"
        return Outlook("likely") if is_open else Outlook("unlikely", refusal.code, str(refusal))
    return Outlook("likely")


def _default_of(model_type: str) -> Any | None:
    """The type's default configuration, None where it has none."""
    kind: Hashable = CONFIG_MAPPING[model_type]
    try:
        return kind()  # type: ignore[operator]
    except Exception:  # noqa: BLE001 - configurations without defaults raise what they like
        return None
