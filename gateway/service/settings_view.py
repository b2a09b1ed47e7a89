"""The verb that shows how this server is configured, for the operator's pages (control.py).

Read-only: settings are read once, at the start. Secrets are named and never shown, not even their
length; nor is anything else whose name says that it may hold one.
"""

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.config import SECRETS, sources_of
from gateway.service.control import Control, require
from gateway.settings import settings_reference

DEFAULT: Final = "default"
_PLAIN: Final = frozenset({"password_users", "tls_key_file"})
"""Whose names sound like a secret's: names of users, of a file."""
_SOUNDS_SECRET: Final = re.compile(r"(password|secret|token|credential|key)(_|$)|_url$")


@dataclass(frozen=True, slots=True)
class SettingView:
    """One setting as it holds in this process. `value` and `default` as they stand in
    polyhost.toml; of a secret, only whether it is set."""

    name: str
    env: str
    value: str
    default: str
    source: str
    description: str
    is_secret: bool

    @property
    def is_set(self) -> bool:
        """Whether it is not the default."""
        return self.source != DEFAULT


def settings_view(control: Control, text: str = "") -> list[SettingView]:
    """All settings of whose name or description `text` is a part; those that were set first."""
    require(control, "models.write")
    settings, wanted = control.settings, text.strip().lower()
    sources = sources_of(settings)
    found = []
    for row in settings_reference():
        if wanted not in f"{row.name} {row.description}".lower():
            continue
        value = getattr(settings, row.name)
        secret = is_secret(row.name, value)
        shown = ("set" if value else "not set") if secret else _text(value)
        default = "not set" if secret else _text(row.default)
        source = sources.get(row.name, DEFAULT)
        found.append(
            SettingView(row.name, row.env, shown, default, source, row.description, secret)
        )
    return sorted(found, key=lambda one: not one.is_set)


def is_secret(name: str, value: object) -> bool:
    """Whether it may hold what only the server is to know."""
    if name in SECRETS:
        return True
    sounds = isinstance(value, str) and _SOUNDS_SECRET.search(name) is not None
    return sounds and name not in _PLAIN and not _is_plain_url(name, value)


def _is_plain_url(name: str, value: object) -> bool:
    """An address without a user, a password or a query in it."""
    return name.endswith("_url") and isinstance(value, str) and not re.search("[@?]", value)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
