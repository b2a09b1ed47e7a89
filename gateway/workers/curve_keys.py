"""CURVE key pairs of servers and of machines with workers, in a file of the data folder.

A server is known to workers on other machines by its public key, and such a machine to servers by
its own. Only public halves leave the machine. Keys are written as ZeroMQ writes them: Z85, 40
characters.
"""

from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import zmq

from engine.objects.whole_files import write_once
from registry.errors import RegistryError

FILE = "curve-key.json"


class WorkerAddress(NamedTuple):
    """Where a worker listens. `public_key`: of a worker on another machine, whose endpoint is tcp;
    empty for one of this machine."""

    worker_id: str
    endpoint: str
    public_key: str = ""


_Key: TypeAlias = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class KeyPair(msgspec.Struct, frozen=True):
    """Both halves, in Z85."""

    public_key: _Key
    secret_key: _Key


class KeyFileError(RegistryError):
    """The file of the key pair cannot be read; the message says what to do."""


def key_pair(data_path: Path) -> KeyPair:
    """The data folder's own, drawn where there is none yet. Raises KeyFileError, OSError.

    Of several processes that come first, one draws it for all.
    """
    path = data_path / FILE
    if not path.exists():
        data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        public, secret = zmq.curve_keypair()
        while public.startswith(b"-"):  # The commands would take that for an option.
            public, secret = zmq.curve_keypair()
        drawn = msgspec.json.encode(KeyPair(public.decode(), secret.decode()))
        write_once(path, drawn)
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeyPair)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(
            f"{path} is damaged ({error}): put it back from a backup, or delete it and give the "
            "new public key to the other machines"
        ) from error
