"""Whose journal and whose open records (stage 10): a gateway's, by its id and its data folder's.

    data/journal/server-id     made once: which data folder this is, whoever shares its database
    data/journal/GATEWAY_ID/   its journal

Every server has a `gateway-0`. Several servers may share one database, and each must close only
what it left open itself, so an open record names its data folder too. A copy of a data folder is
another server's only without that file.
"""

import contextlib
import os
import secrets
from pathlib import Path

JOURNAL_FOLDER = "journal"
SERVER_ID = "server-id"


def owner_of(data_path: Path, gateway_id: str) -> str:
    """What the gateway's open records name (OpenRecord.gateway_id). Raises OSError."""
    return f"{_server_id(data_path / JOURNAL_FOLDER)}/{gateway_id}"


def _server_id(folder: Path) -> str:
    """Several processes may come first at a time: one of them makes it, whole, for all."""
    path = folder / SERVER_ID
    with contextlib.suppress(FileNotFoundError):
        return path.read_text("ascii")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = folder / f"{SERVER_ID}.{secrets.token_hex(8)}"
    try:
        with made.open("x") as stream:
            stream.write(secrets.token_hex(8))
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        made.unlink(missing_ok=True)
    return path.read_text("ascii")
