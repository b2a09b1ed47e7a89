"""`polyhost servers cert`: certificates by which several servers recognise each other."""

import argparse
import datetime
import importlib
import os
import re
from pathlib import Path
from typing import Any

from admin.cli.common import add_command, add_commands
from registry.errors import InvalidValue, RegistryError

DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    cert = add_command(
        commands, "cert", "make a certificate for each of several servers, and its authority", _cert
    )
    cert.add_argument("names", metavar="NAME", nargs="+", help="a server, such as server-1")
    cert.add_argument(
        "--dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the authority (made at the first time) and a folder for each server",
    )


def _cert(options: argparse.Namespace) -> int:
    for name in options.names:
        if not _NAME.fullmatch(name):
            raise InvalidValue(f"{name!r} is no name for a server: use letters, digits, . and -")
    try:
        authority = _Authority(options.dir)
        for name in options.names:
            authority.issue(name)
            print(f"{options.dir / name}: copy it to `cluster` in the data folder of {name}")
    except ModuleNotFoundError as error:
        raise RegistryError(
            f"making certificates needs a package ({error.name}): pip install 'polyhost[servers]'"
        ) from error
    return 0


class _Authority:
    """In a folder: ca.pem, and ca-key.pem, which no server needs."""

    def __init__(self, folder: Path) -> None:
        """Raises ModuleNotFoundError, OSError, InvalidValue where the folder has half of it."""
        self._x509: Any = importlib.import_module("cryptography.x509")
        self._pem: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
        self._hash: Any = importlib.import_module("cryptography.hazmat.primitives.hashes")
        self._ec: Any = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec")
        self._folder = folder
        cert, key = folder / "ca.pem", folder / "ca-key.pem"
        if cert.exists() != key.exists():
            raise InvalidValue(f"{folder} must have both ca.pem and ca-key.pem, or neither")
        if not cert.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._key = self._ec.generate_private_key(self._ec.SECP256R1())
            self._cert = self._sign("polyhost servers", self._key.public_key(), None, is_ca=True)
            _write(key, self._key_pem(self._key))
            _write(cert, self._cert.public_bytes(self._pem.Encoding.PEM))
        self._key = self._pem.load_pem_private_key(key.read_bytes(), None)
        self._cert = self._x509.load_pem_x509_certificate(cert.read_bytes())

    def issue(self, name: str) -> None:
        """A folder with a new pair. Raises InvalidValue where it is there."""
        folder = self._folder / name
        if folder.exists():
            raise InvalidValue(f"{folder} exists: remove it to make a new certificate for {name}")
        folder.mkdir(mode=0o700)
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        cert = self._sign(name, key.public_key(), self._cert, is_ca=False)
        _write(folder / "key.pem", self._key_pem(key))
        for file, which in (("cert.pem", cert), ("ca.pem", self._cert)):
            _write(folder / file, which.public_bytes(self._pem.Encoding.PEM))

    def _sign(self, name: str, public_key: Any, issuer: Any, *, is_ca: bool) -> Any:
        x509, now = self._x509, datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        ours = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        used = dict.fromkeys(
            (
                *("digital_signature", "content_commitment", "key_encipherment"),
                *("data_encipherment", "key_agreement", "key_cert_sign", "crl_sign"),
                *("encipher_only", "decipher_only"),
            ),
            False,
        ) | {"key_cert_sign" if is_ca else "digital_signature": True}
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**used), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ours),
                critical=False,
            )
            .sign(self._key, self._hash.SHA256())
        )

    def _key_pem(self, key: Any) -> bytes:
        made: bytes = key.private_bytes(
            self._pem.Encoding.PEM, self._pem.PrivateFormat.PKCS8, self._pem.NoEncryption()
        )
        return made


def _write(path: Path, data: bytes) -> None:
    """A new file, of this user alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
