"""A local Hugging Face folder, judged without building a model: registration's first step.

Refuses what this system does not run: pickled weights, code that comes with the checkpoint,
families transformers does not know as causal language models or as multimodal wrappers of one
(`wrapper.py`; encoders: `encoder_families.py`), unknown quantizations (`tensors/`), folders without
a tokenizer. What is left is a configuration object, the files of the weights, and the small files
that go into the pack.

Every refusal is a RegistrationRefused with a stable code and a message that tells the operator what
to do. Does not know the model's modules (`blueprint.py`) or the pack (`convert.py`).
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from engine.encoders import FAMILIES
from engine.errors import RegistrationRefused
from engine.modules.text_part import is_wrapper
from engine.registration.encoder_families import MODULES_NAME, encoder_task
from engine.registration.hub_models import short_text
from engine.registration.tensors import (
    BESIDE,
    GGUF_SUFFIX,
    Declared,
    GgufFile,
    declared_in,
    gguf_scheme,
)
from engine.registration.wrapper import check_layers, check_section, check_wrapper, text_section

CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
COPIED_FILES = (
    CONFIG_NAME,
    "generation_config.json",
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    MODULES_NAME,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
OPTION_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".ckpt", ".pth", ".pkl", ".pickle"})
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
HASH_BLOCK_BYTES = 4 << 20
MAX_JSON_BYTES = 64 << 20
"""Of a checkpoint's small files; the largest vocabularies take half of it."""

Json = TypeVar("Json", dict[str, Any], list[Any])

Progress = Callable[[str, int, int], None]
"""phase ("check", "convert", "probe"), bytes done, bytes in all."""


def read_json(path: Path, code: str, kind: type[Json], max_bytes: int = MAX_JSON_BYTES) -> Json:
    """What is in a file of `max_bytes` at most. Raises RegistrationRefused(code)."""
    try:
        if path.stat().st_size > max_bytes:
            raise RegistrationRefused(
                code,
                f"{path} is larger than {max_bytes} bytes: the file is damaged or hostile; "
                "use another revision of the model",
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RegistrationRefused(
            code, f"{path} cannot be read as JSON ({error}); download the model again"
        ) from error
    if not isinstance(content, kind):
        what = "object" if kind is dict else "list"
        raise RegistrationRefused(code, f"{path} is not a JSON {what}; download the model again")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted, or its one GGUF file.

    Raises RegistrationRefused.

    Pickled weights beside safetensors are ignored, never opened.
    """
    # A pipe of such a name would be waited for without end.
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return [folder / name for name in choose_weights(str(folder), names, folder / INDEX_NAME)]


def choose_weights(label: str, names: Collection[str], index: Path) -> list[str]:
    """Which of the files in a checkpoint's top folder are its weights; `index`: read if named.

    Raises RegistrationRefused.
    """
    if INDEX_NAME in names:
        weight_map = read_json(index, "bad_weights", dict).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise RegistrationRefused(
                "bad_weights", f"{INDEX_NAME} of {label} has no weight_map; download it again"
            )
        chosen = sorted({str(name) for name in weight_map.values()})
        # A name with a separator could point out of the folder, and is none of these.
        missing = [name for name in chosen if name not in names or name == INDEX_NAME]
        if missing:
            raise RegistrationRefused(
                "bad_weights",
                f"{INDEX_NAME} of {label} lists the shard {missing[0]!r:.200}, which is no weight "
                "file in its top folder; download the model again",
            )
        return chosen
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if len(found) == 1 and not found[0].startswith("adapter"):
        return found
    packed = sorted(name for name in names if name.endswith(GGUF_SUFFIX))
    if packed and not found:
        if len(packed) == 1:
            return packed
        raise RegistrationRefused(
            "no_weights",
            f"{label} has {len(packed)} GGUF files ({', '.join(packed[:3])}); put the one to "
            "register, merged if it is split, into a folder of its own",
        )
    pickles = sorted(name for name in names if Path(name).suffix in PICKLE_SUFFIXES)
    if pickles and not found:
        raise RegistrationRefused(
            "pickle_weights",
            f"{label} has only pickled weights ({', '.join(pickles[:3])}), which can run code "
            "when opened; use a revision with safetensors, or convert the model with "
            "save_pretrained() in an isolated environment",
        )
    raise RegistrationRefused(
        "no_weights",
        f"{label} has neither {SINGLE_NAME} nor {INDEX_NAME}"
        + (f" (only {', '.join(found[:3])})" if found else "")
        + "; use a complete model",
    )


def check_no_code(label: str, names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Raises RegistrationRefused("custom_code") where the checkpoint brings its own code."""
    code = sorted(
        name
        for name in names
        if name.endswith(".py") and name.startswith(("modeling_", "modelling_", "configuration_"))
    )
    if config.get("auto_map") or code:
        what = ", ".join(code[:3]) if code else "auto_map in config.json"
        raise RegistrationRefused(
            "custom_code",
            f"{label} needs its own modelling code ({what}), which is never run; use a "
            "revision of the model that transformers supports without trust_remote_code",
        )


def load_config(folder: Path) -> Any:
    """The transformers configuration object. Raises RegistrationRefused."""
    if not folder.is_dir():
        raise RegistrationRefused("no_source", f"{folder} is not a folder")
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise RegistrationRefused("bad_config", f"{folder} has no {CONFIG_NAME}")
    raw = read_json(path, "bad_config", dict)
    check_section(path, raw)
    text = text_section(raw)
    check_no_code(str(folder), (entry.name for entry in folder.iterdir()), raw)
    check_no_code(str(folder), (), text)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise RegistrationRefused("bad_config", f"{path} has no model_type")
    declared_of(folder)
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise RegistrationRefused("bad_config", f"architectures in {path} is not a list")
    named = [str(name) for name in named]
    encodes = encoder_task(model_type, named, (folder / MODULES_NAME).is_file()) is not None
    if not encodes:
        check_causal(str(folder), model_type, named)
    try:
        config = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a library's validators: their error types are not a contract
        raise RegistrationRefused(
            "bad_config", f"{path} is not a valid {model_type} configuration: {error}"
        ) from error
    for part in (config, getattr(config, "text_config", None)):
        for name in QUANTIZATION_FIELDS:  # nothing behind this builds a model by it
            if part is not None and hasattr(part, name):
                delattr(part, name)
    check_layers(path, config)
    if not encodes and check_decoder(config):
        check_wrapper(path, raw, config)
    return config


def describe(folder: Path) -> dict[str, Any]:
    """What config.json calls the model, believed in nothing; {} where that cannot be read."""
    try:
        raw = read_json(folder / CONFIG_NAME, "bad_config", dict)
    except RegistrationRefused:
        return {}
    named = raw.get("architectures")
    said = [raw.get(name) for name in QUANTIZATION_FIELDS]
    quantized = next((one for one in said if isinstance(one, dict)), {})
    return {
        "model_type": short_text(raw.get("model_type")),
        "architecture": short_text(named[0]) if isinstance(named, list) and named else "",
        "text_type": short_text(text_section(raw).get("model_type")),
        "source_format": short_text(quantized.get("quant_method")),
    }


def declared_of(folder: Path) -> Declared | None:
    """How the weights are quantized, None where they are not. Raises RegistrationRefused."""
    config = read_json(folder / CONFIG_NAME, "bad_config", dict)
    suffixes = {path.suffix for path in folder.iterdir()}
    if GGUF_SUFFIX in suffixes and ".safetensors" not in suffixes:
        with GgufFile(weight_files(folder)[0]) as file:
            return Declared(GGUF_SUFFIX[1:], codes=gguf_scheme(file))
    for name, method in BESIDE.items():
        said = read_json(folder / name, "bad_config", dict) if (folder / name).is_file() else {}
        # Tools of ONNX use one of these names for something else.
        if said.keys() & {"bits", "w_bit", "quantization", "quant_algo"}:
            return declared_in(config, {"quant_method": method} | said)
    return declared_in(config, {})


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json for weights that are not as its checkpoint had them."""
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_FIELDS}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(inner)
    return plain


def check_causal(label: str, model_type: str, named: Sequence[str]) -> None:
    """Raises RegistrationRefused unless the type has a model that generates text, and this is it.

    `named`: the architectures of the checkpoint, where it names some.
    """
    tables = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = list(dict.fromkeys(str(t[model_type]) for t in tables if model_type in t))
    if model_type not in CONFIG_MAPPING or not known:
        raise RegistrationRefused(
            "unknown_family",
            f"model type {model_type!r} is not supported: supported are causal language models of "
            f"the installed transformers and encoders ({', '.join(FAMILIES)})",
        )
    architectures = named or known
    if {name.lower() for name in known}.isdisjoint(name.lower() for name in architectures):
        raise RegistrationRefused(
            "unknown_family",
            f"{label} contains a {', '.join(architectures)}; of this model type only the causal "
            f"language model ({' or '.join(known)}) is supported",
        )


def check_decoder(config: Any) -> bool:
    """Whether it is a wrapper. Raises RegistrationRefused unless text is all that it generates."""
    try:
        wraps = is_wrapper(config)
    except ValueError:  # several text models in one
        wraps = None
    table = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if wraps else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = wraps is not None and config.model_type in table
    if not known or getattr(config, "is_encoder_decoder", False):
        raise RegistrationRefused(
            "unknown_family",
            f"model type {config.model_type!r} is not supported: it is not a text-only decoder",
        )
    return bool(wraps)


def check_tokenizer(folder: Path) -> None:
    """Raises RegistrationRefused unless tokenizer.json is there and all that goes with it is whole;
    itself it is read by `tokenizer_check.py`.

    What the gateway cannot read of the small files it does without, and prompts come out otherwise.
    """
    for name in OPTION_FILES:
        if (folder / name).is_file():
            read_json(folder / name, "bad_config", dict)
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        raise RegistrationRefused(
            "no_tokenizer",
            f"{folder} has no {TOKENIZER_NAME}; create it from a fast tokenizer with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )


def content_digest(paths: list[Path], progress: Progress) -> bytes:
    """blake2b over names and contents' digests of the files, in the order given."""
    total = sum(path.stat().st_size for path in paths)
    done = 0
    whole = hashlib.blake2b(digest_size=16)
    buffer = memoryview(bytearray(HASH_BLOCK_BYTES))
    for path in paths:
        one = hashlib.blake2b(digest_size=16)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                one.update(buffer[:count])
                done += count
                progress("check", done, total)
        whole.update(path.name.encode() + b"\0" + one.digest())
    return whole.digest()
