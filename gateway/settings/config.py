"""Where the settings come from, and the only file that reads the environment.

Sources, later ones win: the defaults in settings.py <- `polyhost.toml` <- `POLYHOST_<FIELD>` <- the
command line's overrides. A value that cannot be what its field says ends the start with one
sentence that names the field and where the value came from. Unknown keys in the file are refused;
unknown environment variables are not, because other tools use the prefix too.
"""

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.settings.settings import ENV_PREFIX, Settings, annotations

DEFAULT_CONFIG_FILE = Path("polyhost.toml")
SECRETS = (
    *("admin_password", "database_url", "demo_api_key", "hub_token", "metrics_token"),
    *("oidc_client_secret", "redis_url"),
)
"""Settings that may hold secrets: shown to nobody."""
_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMPDIR|TEMP|TMP|VIRTUAL_ENV|LD_PRELOAD"
    r"|CC|CXX|CPATH"
    r"|PYTHON[A-Z0-9]*|TORCH[A-Z0-9_]*"
    r"|(LC|OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|ATEN|DNNL|ONEDNN|MALLOC|PYTORCH|TRITON|NCCL|NVIDIA"
    r"|HF|TRANSFORMERS|TOKENIZERS|SAFETENSORS)_[A-Z0-9_]+"
    r"|[A-Z0-9_]+_(HOME|PATH|DIR|DIRECTORY|VISIBLE_DEVICES|DEVICE_ORDER|MODULE_LOADING"
    r"|LAUNCH_BLOCKING)"
)
"""Variables that a worker is told: of the system, of Python, of torch's libraries and devices."""
_SOUNDS_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|KEY|CREDENTIALS|ENDPOINT)(_|$)|^POLYHOST_")
_FOR_HUBS = re.compile(
    r"HF_TOKEN|HF_TOKEN_PATH|HUGGING_FACE_HUB_TOKEN|HF_ENDPOINT|SSL_CERT_FILE|SSL_CERT_DIR"
    r"|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(?i:(HTTP|HTTPS|ALL|NO)_PROXY)"
)


class SettingsError(ValueError):
    """A setting cannot be used; the message is one sentence for the operator."""


def load_settings(
    config_path: Path | str | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Read all sources. Overrides that are None count as not given.

    Without `config_path`, `polyhost.toml` of the working directory is read if there is one.
    Raises SettingsError.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    path = _config_file(config_path)
    if path is not None:
        for name, value in _read_toml(path).items():
            values[name], origin[name] = value, str(path)
    names = set(annotations())
    for variable, text in (os.environ if environ is None else environ).items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX) and name in names:
            values[name], origin[name] = _parse_env(name, text), variable
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name], origin[name] = value, "the command line"
    return _checked(values, origin)


def decode_settings(data: bytes) -> Settings:
    """What another process of this server handed over as JSON. Raises SettingsError."""
    try:
        values = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise SettingsError(f"the settings of the process that started this: {error}") from error
    return _checked(values, dict.fromkeys(values, "the process that started this"))


def sources_of(
    settings: Settings, environ: Mapping[str, str] | None = None, path: Path | None = None
) -> dict[str, str]:
    """Where each value that is not the default came from, as far as this process can tell: a
    variable, the file `path` (polyhost.toml here), or else the command line or `--config`'s file.
    """
    given = os.environ if environ is None else environ
    file = path or DEFAULT_CONFIG_FILE
    try:
        in_file = _read_toml(file) if file.is_file() else {}
    except SettingsError:  # broken since the start
        in_file = {}
    found: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        name, variable = field.name, ENV_PREFIX + field.name.upper()
        if getattr(settings, name) == field.default:
            continue
        if variable in given:
            found[name] = variable
        elif in_file.get(name) == getattr(settings, name):
            found[name] = str(file)
        else:
            found[name] = "the command line, or the file of --config"
    return found


def child_environment() -> dict[str, str]:
    """The environment of a gateway or dispatcher process: this one's. Settings it has from its
    parent, as these were read."""
    return dict(os.environ)


def worker_environment(num_threads: int) -> dict[str, str]:
    """The environment of a process that reads strangers' weights and files (a worker, a
    registration): what Python, torch and its libraries go by, nothing else that this process was
    told, and OpenMP told to yield when it waits.

    On two cores shared with a busy gateway, threads that spin at OpenMP's barrier cost a scheduler
    slice (~8 ms) per small product; waiting passively costs microseconds. Whatever the operator has
    set already wins. `num_threads` 0 leaves the count to the worker.
    """
    environment = {name: text for name, text in os.environ.items() if _may_pass(name)}
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    environment.setdefault("KMP_BLOCKTIME", "1")
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment


def _may_pass(name: str) -> bool:
    return bool(_PASSED.fullmatch(name)) and not _SOUNDS_SECRET.search(name)


def hub_environment() -> dict[str, str]:
    """What a fetch from a hub needs besides: its address and token, proxies, certificates."""
    return {name: text for name, text in os.environ.items() if _FOR_HUBS.fullmatch(name)}


def prepare_environment() -> dict[str, str]:
    """The environment of a process that reads strangers' templates and tokenizers: where libraries
    are, and what the day and the language depend on."""
    names = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ")
    return {name: os.environ[name] for name in names if name in os.environ}


def _checked(values: Mapping[str, Any], origin: Mapping[str, str]) -> Settings:
    """Each by its type and bounds, and all together. `origin`: where each came from."""
    unknown = sorted(values.keys() - annotations().keys())
    if unknown:
        raise SettingsError(
            f"unknown setting {unknown[0]!r} in {origin[unknown[0]]}: correct its name or remove it"
        )
    checked = {name: _check(name, value, origin[name]) for name, value in values.items()}
    try:
        return Settings(**checked)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _config_file(config_path: Path | str | None) -> Path | None:
    if config_path is not None:
        return Path(config_path)
    return DEFAULT_CONFIG_FILE if DEFAULT_CONFIG_FILE.is_file() else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}; check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error


def _parse_env(name: str, text: str) -> Any:
    """Text of a variable as the field's type where it parses; `_check` complains where not."""
    kind = annotations()[name].__origin__
    if kind is bool:
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
    if kind is str:
        return text
    try:
        if kind not in (int, float):  # a list: as JSON
            return msgspec.json.decode(text)
        return int(text) if kind is int else float(text)
    except ValueError:
        return text


def _check(name: str, value: Any, origin: str) -> Any:
    """The value as its field's type (an int where a float is wanted becomes one)."""
    try:
        checked = msgspec.convert(value, annotations()[name], strict=True)
        if isinstance(checked, float) and not math.isfinite(checked):
            raise msgspec.ValidationError("Expected a finite number")
        return checked
    except msgspec.ValidationError as error:
        shown = "" if name in SECRETS else f" = {value!r}"
        raise SettingsError(f"{name}{shown} from {origin}: {error}") from error
