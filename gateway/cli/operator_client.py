"""Asking the running server of a data folder: the other end of operator_socket.py.

Standard library only; for the CLI, and later for whoever shows the same on a page.
"""

import json
import socket
from pathlib import Path
from typing import Any

from gateway.server.machine import socket_path
from registry.errors import RegistryError

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 << 20


def ask(data_path: Path, timeout_s: float = TIMEOUT_S, **question: object) -> dict[str, Any]:
    """The answer. Raises RegistryError where no server runs there, or where it says why not."""
    answer: dict[str, Any] = json.loads(ask_raw(data_path, timeout_s, **question))
    if "error" in answer:
        raise RegistryError(str(answer["error"]))
    return answer


def ask_raw(data_path: Path, timeout_s: float = TIMEOUT_S, **question: object) -> bytes:
    """The answer as it came: JSON, perhaps with an `error`. Raises RegistryError where none did."""
    path = socket_path(data_path, "operator")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(str(path))
            link.sendall(json.dumps(question).encode() + b"\n")
            text = _read(link)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise RegistryError(
            f"no server is running on {data_path}: only a running one can say this"
        ) from error
    except TimeoutError as error:
        raise RegistryError("the server did not answer in time: try again") from error
    except ConnectionError:
        text = b""
    if not text:
        raise RegistryError("the server sent no answer: too many ask at once, or it is stopping")
    return text


def _read(link: socket.socket) -> bytes:
    parts, size = [], 0
    while part := link.recv(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise RegistryError("the server's answer has no end")
    return b"".join(parts)
