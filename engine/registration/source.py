"""A local Hugging Face folder, judged without building a model: registration's first step.

Refuses what this system does not run: pickled weights, code that comes with the checkpoint,
families transformers does not know as causal language models (encoders: `encoder_families.py`),
quantized checkpoints, folders without a tokenizer. What is left is a configuration object, a set of
named tensors that can be read one at a time, and the small files that go into the pack as they are.

Every refusal is a RegistrationRefused with a stable code and a message that tells the operator what
to do. Does not know the model's modules (`blueprint.py`) or the pack (`convert.py`).
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.encoders import FAMILIES
from engine.errors import RegistrationRefused
from engine.registration.encoder_families import MODULES_NAME, encoder_task

CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
COPIED_FILES = (
    CONFIG_NAME,
    "generation_config.json",
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    MODULES_NAME,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
OPTION_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".ckpt", ".pth", ".pkl", ".pickle"})
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HASH_BLOCK_BYTES = 4 << 20
PIECE_BYTES = 64 << 20
MAX_LAYERS = 1024
"""Each is built as modules before any weights are there: a number too many would never end."""

# As safetensors headers spell them. Anything else floating is a quantized checkpoint.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PLAIN_DTYPES = frozenset({*FLOAT_BYTES, "I64", "I32", "I16", "I8", "U8", "BOOL"})
_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Json = TypeVar("Json", dict[str, Any], list[Any])

Progress = Callable[[str, int, int], None]
"""phase ("check", "convert", "probe"), bytes done, bytes in all."""


def read_json(path: Path, code: str, kind: type[Json], max_bytes: int = 0) -> Json:
    """What is in a file, of `max_bytes` at most unless 0. Raises RegistrationRefused(code)."""
    try:
        if max_bytes and path.stat().st_size > max_bytes:
            raise RegistrationRefused(code, f"{path} is larger than {max_bytes} bytes")
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
    """The safetensors files of a checkpoint, sorted. Raises RegistrationRefused.

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
    check_no_code(str(folder), (entry.name for entry in folder.iterdir()), raw)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise RegistrationRefused("bad_config", f"{path} has no model_type")
    if raw.get("quantization_config"):
        raise RegistrationRefused(
            "quantized_weights",
            f"{folder} has quantized weights; register the unquantized checkpoint",
        )
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise RegistrationRefused("bad_config", f"architectures in {path} is not a list")
    named = [str(name) for name in named]
    encodes = encoder_task(model_type, named, (folder / MODULES_NAME).is_file()) is not None
    if not encodes:
        _check_causal(folder, model_type, named)
    try:
        config = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a library's validators: their error types are not a contract
        raise RegistrationRefused(
            "bad_config", f"{path} is not a valid {model_type} configuration: {error}"
        ) from error
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise RegistrationRefused(
            "bad_config", f"{path} has {layers} layers; the maximum is {MAX_LAYERS}"
        )
    if not encodes and not _is_text_decoder(config):
        raise RegistrationRefused(
            "unknown_family",
            f"model type {model_type!r} is not supported: it is not a text-only decoder",
        )
    return config


def _check_causal(folder: Path, model_type: str, named: list[str]) -> None:
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if model_type not in CONFIG_MAPPING or causal is None:
        raise RegistrationRefused(
            "unknown_family",
            f"model type {model_type!r} is not supported: supported are causal language models of "
            f"the installed transformers and encoders ({', '.join(FAMILIES)})",
        )
    architectures = named or [causal]
    if causal.lower() not in (name.lower() for name in architectures):
        raise RegistrationRefused(
            "unknown_family",
            f"{folder} contains a {', '.join(architectures)}; of this model type only the causal "
            f"language model ({causal}) is supported",
        )


def _is_text_decoder(config: Any) -> bool:
    try:
        whole = config.get_text_config() is config
    except ValueError:  # several text models in one
        return False
    return whole and not getattr(config, "is_encoder_decoder", False)


def check_tokenizer(folder: Path) -> None:
    """Raises RegistrationRefused unless tokenizer.json is there and all that goes with it is whole.

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
    try:
        Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library raises bare Exceptions, and panics
        raise RegistrationRefused(
            "no_tokenizer", f"{path} cannot be read ({error}); download it again"
        ) from error


def piece_rows(row_bytes: int, max_bytes: int = PIECE_BYTES) -> int:
    """Rows of a piece: where there are more than 16 a multiple of them, int4's blocks of rows."""
    rows = max(1, max_bytes // max(1, row_bytes))
    return rows - rows % 16 if rows > 16 else rows


class SourceTensors:
    """A checkpoint's tensors by their names in the files, read one at a time. A context manager."""

    def __init__(self, files: list[Path]) -> None:
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            for path in files:
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._handles:
                    raise RegistrationRefused(
                        "bad_weights",
                        f"tensor {name} is in more than one shard; download the model again",
                    )
                entry = handle.get_slice(name)
                self._handles[name] = handle
                self.dtypes[name] = str(entry.get_dtype())
                self.shapes[name] = tuple(entry.get_shape())
            self._find(path)
        except (SafetensorError, OSError) as error:
            raise RegistrationRefused(
                "bad_weights", f"{path} is damaged ({error}); download it again"
            ) from error
        for name, dtype in self.dtypes.items():
            if dtype not in PLAIN_DTYPES:
                raise RegistrationRefused(
                    "quantized_weights",
                    f"tensor {name} has the unsupported type {dtype}; register the unquantized "
                    "checkpoint",
                )

    def _find(self, path: Path) -> None:
        """Where each tensor's bytes lie; the library has checked the header before."""
        file = self._stack.enter_context(path.open("rb", buffering=0))
        length = int.from_bytes(file.read(8), "little")
        for name, entry in json.loads(os.pread(file.fileno(), length, 8)).items():
            if name != "__metadata__":
                self._places[name] = file.fileno(), 8 + length + entry["data_offsets"][0]

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
        """The tensor in the file's dtype, some of its rows (its first axis) at a time.

        Read and not mapped: what is touched of a mapping stays with the process until the file is
        closed, and looks like memory that registering a large model needs. Raises
        RegistrationRefused where the file is damaged.
        """
        shape, dtype = self.shapes[name], _TORCH_DTYPES[self.dtypes[name]]
        rows, inner = (shape[0], shape[1:]) if shape else (1, ())
        row_bytes = torch.Size(inner).numel() * dtype.itemsize
        step = piece_rows(row_bytes, max_bytes)
        descriptor, place = self._places[name]
        for start in range(0, rows, step):
            count = min(step, rows - start)
            piece = torch.empty(count * row_bytes, dtype=torch.uint8)
            target, done = piece.numpy().data, 0
            while done < len(target):
                got = os.preadv(descriptor, [target[done:]], place + start * row_bytes + done)
                if not got:
                    raise RegistrationRefused(
                        "bad_weights", f"tensor {name} is truncated; download the model again"
                    )
                done += got
            yield piece.view(dtype).view(count, *inner) if shape else piece.view(dtype).view(())

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the file's dtype. Raises RegistrationRefused where the file is damaged."""
        try:
            tensor = self._handles[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise RegistrationRefused(
                "bad_weights", f"tensor {name} cannot be read ({error}); download the model again"
            ) from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def float_dtype(self) -> str:
        """The floating type most bytes are in, as safetensors spells it; "F32" if there is none."""
        size: dict[str, int] = {}
        for name, dtype in self.dtypes.items():
            if dtype in FLOAT_BYTES:
                count = torch.Size(self.shapes[name]).numel()
                size[dtype] = size.get(dtype, 0) + count * FLOAT_BYTES[dtype]
        return max(size, key=lambda dtype: size[dtype]) if size else "F32"

    def __enter__(self) -> "SourceTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


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
