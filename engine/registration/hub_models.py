"""What a hub says of a model: licence, access, downloads, type, format, number of parameters.

Read from the answers of `/api/models/ID/revision/REV` and of `/api/models?search=`, which have the
same fields. All of it is a claim: nothing here decides whether a model can be hosted, and what is
missing or strange is left out. Texts come from anybody and end on terminals and pages, so they are
short and printable, or empty. Does not know the network (`hub.py`) or the judgement (`outlook.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TEXT = 96
MAX_NAMES = 8
MAX_PARAMETERS = 1 << 50

SAFETENSORS, GGUF, PICKLES = "safetensors", "gguf", "pickles"
# The hub's tags for libraries whose files hold weights, in the order of preference.
_FORMATS = {"safetensors": SAFETENSORS, "gguf": GGUF, "pytorch": PICKLES}
_CUSTOM_CODE = "custom_code"
_LICENSE, _BASE = "license:", "base_model:"
_SENTENCES = "sentence-transformers"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model as its hub describes it; empty, 0 or None where it does not say.

    license       its name on the hub, such as "apache-2.0"; of "other" ones the name they give
    gated         "auto" or "manual": access has to be asked for; "": it has not
    task          the hub's pipeline tag, such as "text-generation"
    base_model    what it was made from
    format        safetensors, gguf or pickles
    quantization  what `quantization_config` says, as far as the hub shows it
    sentences     whether sentence-transformers' files are said to be there
    """

    id: str
    license: str = ""
    gated: str = ""
    downloads: int = 0
    likes: int = 0
    task: str = ""
    base_model: str = ""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    num_parameters: int = 0
    format: str = ""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    custom_code: bool = False
    sentences: bool = False

    @property
    def method(self) -> str:
        """How its weights are quantized, "" where they are not."""
        return short_text(self.quantization.get("quant_method"))


def read_model(answer: Mapping[str, Any], name: str = "") -> HubModel:
    """From one entry of an answer. `name`: what was asked for, where the entry has no id."""
    tags = [short_text(tag) for tag in _list(answer.get("tags"))]
    config, card = _object(answer.get("config")), _object(answer.get("cardData"))
    weights, packed = _object(answer.get("safetensors")), _object(answer.get("gguf"))
    kinds = {*tags, short_text(answer.get("library_name"))}
    kinds |= {"safetensors"} if weights else set()
    kinds |= {"gguf"} if packed else set()
    return HubModel(
        id=short_text(answer.get("id") or answer.get("modelId")) or name,
        license=_license(card, tags),
        gated=short_text(answer.get("gated")),
        downloads=_count(answer.get("downloads")),
        likes=_count(answer.get("likes")),
        task=short_text(answer.get("pipeline_tag")),
        base_model=_base_model(card, tags),
        model_type=short_text(config.get("model_type")) or short_text(packed.get("architecture")),
        architectures=_names(config.get("architectures")),
        num_parameters=_parameters(weights) or _count(packed.get("total")),
        format=next((kind for tag, kind in _FORMATS.items() if tag in kinds), ""),
        quantization=_object(config.get("quantization_config")),
        custom_code=_CUSTOM_CODE in tags or bool(config.get("auto_map")),
        sentences=_SENTENCES in kinds,
    )


def shown(model: HubModel) -> dict[str, Any]:
    """For a line of the registering process."""
    fields = {name: getattr(model, name) for name in HubModel.__slots__}
    del fields["quantization"]
    return fields | {"method": model.method}


def short_text(value: Any) -> str:
    """A short printable text, or ""."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        return ""
    return value


def _license(card: Mapping[str, Any], tags: Iterable[str]) -> str:
    said = card.get("license")
    names = _names([said] if isinstance(said, str) else said)
    names = names or tuple(tag[len(_LICENSE) :] for tag in tags if tag.startswith(_LICENSE))
    own = short_text(card.get("license_name"))
    return own if own and names in ((), ("other",)) else ", ".join(names)


def _base_model(card: Mapping[str, Any], tags: Iterable[str]) -> str:
    said = card.get("base_model")
    names = _names([said] if isinstance(said, str) else said)
    # As tags: base_model:ORG/NAME, and base_model:quantized:ORG/NAME beside it.
    made = [tag.rpartition(":")[2] for tag in tags if tag.startswith(_BASE)]
    return next(iter((*names, *made)), "")


def _parameters(weights: Mapping[str, Any]) -> int:
    """The hub counts packed words as they are stored, so of packed codes this is too few."""
    kinds = _object(weights.get("parameters"))
    return _count(weights.get("total")) or sum(_count(count) for count in kinds.values())


def _names(value: Any) -> tuple[str, ...]:
    return tuple(name for one in _list(value)[:MAX_NAMES] if (name := short_text(one)))


def _count(value: Any) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_PARAMETERS
    return int(value) if good else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
