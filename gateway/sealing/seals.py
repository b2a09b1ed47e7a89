"""Reasoning that leaves the server sealed, or signed, and comes back.

    sealed   `phs1.KEY_ID.` + base64(nonce, AES-256-GCM of the text)    Responses' encrypted_content
    signed   `phm1.KEY_ID.` + base64(HMAC-SHA-256 of the text)          signatures of Messages

A tenant's keys are derived from a master key by HKDF-SHA-256, with the tenant's id in `info`, one
for either use. Tenant and model are also authenticated with each text: what another tenant or model
made, or what was changed, does not open. Nonces are random, 96 bits; NIST SP 800-38D allows 2**32
texts a key with these.

The AEAD is that of the library `cryptography`: Python's standard library has none, and pyzmq does
not offer what libsodium has of them.
"""

import base64
import binascii
import hmac
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gateway.sealing.master_keys import KEY_BYTES, MasterKey

SEALED, SIGNED = "phs1.", "phm1."
"""Begin what this server made; what has another beginning is other providers'."""
ReadKeys: TypeAlias = Callable[[], Sequence[MasterKey]]
"""All master keys, the newest first. Raises SealKeyError."""
_NONCE_BYTES = 12
_MAC_BYTES = 16


class SealBroken(Exception):
    """It is not what this tenant was given for this model."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """A tenant's, under one master key."""

    key_id: str
    aead: AESGCM
    mac: bytes


class TenantSeal:
    """Seals and opens for one tenant. Pure but for nonces. Texts are Unicode without surrogates.
    Keys are derived when they are first needed: most requests need none."""

    def __init__(self, tenant_id: str, read: ReadKeys) -> None:
        self._tenant_id = tenant_id
        self._read = read

    @cached_property
    def _keys(self) -> dict[str, _Keys]:
        """By their ids, the newest first."""
        return {key.id: _derived(key, self._tenant_id) for key in self._read()}

    @property
    def _newest(self) -> _Keys:
        return next(iter(self._keys.values()))

    def seal(self, text: str, model: str) -> str:
        """The text so that nobody reads or changes it on its way."""
        keys, nonce = self._newest, os.urandom(_NONCE_BYTES)
        sealed = keys.aead.encrypt(nonce, text.encode(), self._about(model))
        return f"{SEALED}{keys.key_id}.{_spelled(nonce + sealed)}"

    def open(self, sealed: str, model: str) -> str:
        """The text. Raises SealBroken."""
        keys, data = self._found(sealed, SEALED)
        try:
            text = keys.aead.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], self._about(model))
        except (InvalidTag, ValueError) as error:  # ValueError: it is too short for a nonce
            raise SealBroken from error
        return text.decode()

    def sign(self, text: str, model: str) -> str:
        """What says that the text is as it was."""
        keys = self._newest
        return f"{SIGNED}{keys.key_id}.{_spelled(self._mac(keys, text, model))}"

    def check(self, signature: str, text: str, model: str) -> None:
        """Raises SealBroken where the signature is not this text's."""
        keys, data = self._found(signature, SIGNED)
        if not hmac.compare_digest(data, self._mac(keys, text, model)):
            raise SealBroken

    def _found(self, given: str, beginning: str) -> tuple[_Keys, bytes]:
        key_id, _, spelled = given.removeprefix(beginning).partition(".")
        try:
            return self._keys[key_id], base64.b64decode(spelled, b"-_", validate=True)
        except (KeyError, ValueError, binascii.Error) as error:
            raise SealBroken from error

    def _mac(self, keys: _Keys, text: str, model: str) -> bytes:
        about = self._about(model)
        told = len(about).to_bytes(4, "big") + about + text.encode()
        return hmac.digest(keys.mac, told, "sha256")[:_MAC_BYTES]

    def _about(self, model: str) -> bytes:
        return f"{self._tenant_id}\0{model}".encode()


class Seals:
    """Of a server."""

    def __init__(self, read: ReadKeys) -> None:
        """`read`: called once, when a key is first needed."""
        self._read = cache(read)
        self.of = lru_cache(1024)(self._of)
        """The tenant's seal, by its id."""

    def _of(self, tenant_id: str) -> TenantSeal:
        return TenantSeal(tenant_id, self._read)


def _derived(master: MasterKey, tenant_id: str) -> _Keys:
    info = b"polyhost reasoning of tenant " + tenant_id.encode()
    made = HKDF(SHA256(), 2 * KEY_BYTES, salt=None, info=info).derive(master.key)
    return _Keys(master.id, AESGCM(made[:KEY_BYTES]), made[KEY_BYTES:])


def _spelled(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()
