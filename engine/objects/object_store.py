"""The seam for bytes that are too long for a database: responses and files today, packs later.

An object has a name and bytes, and never changes: whoever has new bytes puts a new object. A name
is `tenant/kind/random` and is made here, never from what a caller wrote. What makes an object exist
for anybody is a row in a database that names it, so the order of writes is fixed:

    to store    object first, row second    a crash in between leaves an object without a row
    to delete   row first, object second    the same

and a sweeper deletes objects without a row once they are old enough that nobody is about to write
the row. No row ever names an object that is not there.

`folder_store.py` is the implementation. One for S3-compatible services (through `obstore`) would be
another class with these methods; there is none yet.
"""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

_PART = re.compile(r"[A-Za-z0-9_-]{1,64}")
NUM_PARTS = 3
PIECE_BYTES = 1 << 20


class ObjectMissing(Exception):
    """There is no object of that name."""


class StoreAway(OSError):
    """What was stored is not here: a folder that is not mounted, or another one in its place. No
    object is known to be missing, so nothing may be deleted for it."""


class InvalidName(ValueError):
    """A name that this module did not make."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """An object without its bytes. `modified_at`: UTC epoch seconds, when it was put."""

    name: str
    size_bytes: int
    modified_at: float


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What was put. `sha256`: of the bytes, in hex."""

    name: str
    size_bytes: int
    sha256: str


class ObjectWriter(Protocol):
    """An object that comes in pieces, of which nothing is seen before `finish`. Blocking calls;
    those of several threads wait for one another."""

    def write(self, data: bytes) -> None:
        """The next bytes. Raises OSError; then only `abort` is left."""

    def finish(self) -> StoredObject:
        """The object is whole and durable when it returns. Raises OSError."""

    def abort(self) -> None:
        """Nothing of it stays, unless it was finished."""


class ObjectStore(Protocol):
    """Blocking calls, safe from several threads and processes. OSError: the store has failed;
    StoreAway, one of these, where it is not the one that objects were put into."""

    def check(self) -> None:
        """Raises OSError where the store is not here."""

    def put(self, name: str, data: bytes) -> StoredObject:
        """Store the bytes; durable when it returns, and never seen in part. Raises InvalidName,
        OSError."""

    def writer(self, name: str) -> ObjectWriter:
        """`put` in pieces. Whoever has it finishes or aborts it. Raises InvalidName, OSError."""

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes from `start` on, `length` at most; fewer where the object ends. Raises
        ObjectMissing, InvalidName, OSError."""

    def pieces(self, name: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes that `get` returns, at most PIECE_BYTES at a time. An object that is deleted
        meanwhile is read to its end. Close the generator, or exhaust it. Raises as `get`, with the
        first piece."""

    def stat(self, name: str) -> ObjectStat:
        """Raises as `get`."""

    def digest(self, name: str) -> str:
        """SHA-256 of the bytes that are there now, in hex. Raises as `get`."""

    def delete(self, name: str) -> bool:
        """False where there was none. Raises InvalidName, OSError."""

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Objects below `tenant/` or `tenant/kind/`, or all; in no order. One that is put or
        deleted meanwhile may be in it or not. Raises InvalidName, OSError."""

    def delete_unfinished(self, before_at: float) -> int:
        """Delete what writers that died before then (UTC epoch seconds) left half written. Returns
        how many. Raises OSError."""


def new_name(tenant: str, kind: str) -> str:
    """`tenant/kind/` and 128 random bits in hex. Raises InvalidName."""
    name = f"{tenant}/{kind}/{secrets.token_hex(16)}"
    checked(name, NUM_PARTS)
    return name


def checked(name: str, num_parts: int) -> list[str]:
    """The parts of a name or prefix. Raises InvalidName: each has 1 to 64 letters, digits, `_` or
    `-`, so none is `..`, hidden, or a path of its own."""
    parts = name.split("/")
    if len(parts) != num_parts or not all(map(is_part, parts)):
        raise InvalidName(f"not a name of an object: {name[:200]!r}")
    return parts


def is_part(text: str) -> bool:
    """Whether a name may have this part."""
    return _PART.fullmatch(text) is not None
