"""The file of master keys, from which every tenant's keys are derived.

    {"keys": [{"id": "9f2c41d07be6", "key": "<32 bytes in base64>"}, ...]}

The first key seals what is new, and each opens what it sealed: another key is put in front to
rotate, and an old one is taken out when nothing of it need be opened any more. The file is made
by the process that starts a server without one, with the rights 0600, and by no other: one that is
lost while the server runs is not replaced. Servers whose tenants are the same
need the same file.
"""

import logging
import secrets
from typing import Annotated

import msgspec

from engine.objects.whole_files import write_once
from gateway.settings.settings import Settings
from registry.errors import RegistryError

logger = logging.getLogger(__name__)

KEY_BYTES = 32
_ID_HEX = 12
_Id = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{_ID_HEX}}}\\Z")]


class SealKeyError(RegistryError):
    """The file of master keys cannot be used; the message says what to do."""


class MasterKey(msgspec.Struct, frozen=True):
    """`id`: what is sealed names it."""

    id: _Id
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class _File(msgspec.Struct):
    keys: Annotated[list[MasterKey], msgspec.Meta(min_length=1)]


def ensure_keys(settings: Settings) -> list[MasterKey]:
    """For the process that starts the server, which has the data folder for itself: draws what is
    not there, with a word in the log. Raises SealKeyError."""
    path = settings.seal_keys_path(settings.data_path)
    try:
        if not path.exists() and not settings.seal_keys_file:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            drawn = MasterKey(secrets.token_hex(_ID_HEX // 2), secrets.token_bytes(KEY_BYTES))
            write_once(path, msgspec.json.encode(_File([drawn])))
            logger.info("made %s: back it up. If there was one before, put that one back", path)
        keys = read_keys(settings)
        if path.stat().st_mode & 0o077:
            logger.warning("others may read the master keys in %s: chmod 600 it", path)
    except OSError as error:
        raise SealKeyError(f"{path} cannot be read or made: {error.strerror}") from error
    return keys


def read_keys(settings: Settings) -> list[MasterKey]:
    """Of a server that has them. Raises SealKeyError."""
    path = settings.seal_keys_path(settings.data_path)
    try:
        if not path.exists():
            name = "seal_keys_file: " if settings.seal_keys_file else ""
            raise SealKeyError(f"{name}{path} does not exist: put the keys there")
        keys = msgspec.json.decode(path.read_bytes(), type=_File).keys
    except OSError as error:
        raise SealKeyError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SealKeyError(
            f"{path} has no master keys ({error}): put it back from a backup, or delete it; then "
            "sealed reasoning that callers have cannot be opened any more"
        ) from error
    if len({key.id for key in keys}) < len(keys):
        raise SealKeyError(f"{path} has two keys with one id: give each key an id of its own")
    return keys
