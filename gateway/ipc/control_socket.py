"""Control sockets: an operator's question and one answer, over a Unix socket in the data folder.

One line of JSON each way; the server then closes the connection. A socket and not a route: over
HTTP every caller holds some tenant's key, and a user that may read the data folder may read the
database anyway. The socket is this user's alone: its folder, its mode and, where the system tells
it, the caller's user id say so. Two kinds of handlers answer this way: of the process that
dispatches (gateway/dispatch/operator_handler.py) and of each gateway process, about its cache
(gateway/cache/cache_handler.py). `listening` is the server's end; `ask` and `exchange`, which
block, are the client's.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gateway.ipc import machine
from registry import locks
from registry.errors import RegistryError

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 1 << 16
QUESTION_TIMEOUT_S = 5.0
"""For the question to come, and for the answer to be taken."""
MAX_CALLERS = 8
"""At a time; who comes beyond that is sent away."""


def operator_socket(data_path: Path) -> Path:
    """Where a data folder's server listens."""
    return machine.socket_path(data_path, "operator")


class ControlHandler(Protocol):
    """Who answers on a socket like this one."""

    def answer(self, line: bytes) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """To one question."""


@contextlib.asynccontextmanager
async def listening(path: Path, handler: ControlHandler) -> AsyncIterator[None]:
    """Answer on this path. Raises OSError where it cannot be bound.

    What lies there is of a server that is gone: the caller holds the data folder's lock.
    """
    callers: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(callers) >= MAX_CALLERS
        callers[writer] = asyncio.current_task()
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                if full or not _is_own(writer):
                    return
                found = handler.answer(await reader.readline())
                answer = found if isinstance(found, dict) else await found
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError):  # ValueError: a line beyond the limit
            logger.info("cannot answer a request on the operator socket")
        finally:
            writer.close()
            del callers[writer]

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        server = await asyncio.start_unix_server(call, sock=listener, limit=MAX_QUESTION_BYTES)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)
            # Who is being answered has its connection closed, and so comes to an end.
            tasks = [task for task in callers.values() if task is not None]
            for writer in callers:
                writer.close()
            if tasks:
                await asyncio.wait(tasks, timeout=QUESTION_TIMEOUT_S)


def _is_own(writer: asyncio.StreamWriter) -> bool:
    """Whether the caller is this user, or root; taken for granted where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    peer = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", peer)
    return uid in (0, os.getuid())


TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 << 20


def ask(data_path: Path, timeout_s: float = TIMEOUT_S, **question: object) -> dict[str, Any]:
    """The answer. Raises RegistryError where no server runs there, or where it says why not."""
    answer: dict[str, Any] = msgspec.json.decode(ask_raw(data_path, timeout_s, **question))
    if "error" in answer:
        raise RegistryError(str(answer["error"]))
    return answer


def ask_raw(data_path: Path, timeout_s: float = TIMEOUT_S, **question: object) -> bytes:
    """The answer as it came: JSON, perhaps with an `error`. Raises RegistryError where none did."""
    try:
        text = exchange(operator_socket(data_path), line_of(question), timeout_s)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise nobody_listens(data_path, operator_socket(data_path)) from error
    except TimeoutError as error:
        raise RegistryError("the server did not answer in time: try again") from error
    except ConnectionError:
        text = b""
    if not text:
        raise RegistryError("the server closed the connection: it is busy or stopping; try again")
    return text


def nobody_listens(data_path: Path, path: Path) -> RegistryError:
    """What is so where nobody answers on the socket `path`."""
    if locks.is_held(data_path / locks.SERVER_LOCK):
        return RegistryError(
            f"a server is running on {data_path}, but nobody answers on its socket {path}: it is "
            "starting or stopping, or the file was deleted; try again in a moment, then restart it"
        )
    return RegistryError(
        f"no server is running on {data_path}: start it with `polyhost serve`, or check --data-dir"
    )


def line_of(question: Mapping[str, object]) -> bytes:
    """As it goes over the socket."""
    return msgspec.json.encode(question) + b"\n"


def exchange(path: Path, line: bytes, timeout_s: float) -> bytes:
    """What the server there answers, empty where it closes the connection instead. Raises
    FileNotFoundError or ConnectionRefusedError where nobody listens, TimeoutError,
    ConnectionError, and RegistryError for an answer over MAX_ANSWER_BYTES."""
    answer = bytearray()
    ends_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout_s)
        link.connect(str(path))
        link.sendall(line)
        while part := link.recv(1 << 16):
            answer += part
            if len(answer) > MAX_ANSWER_BYTES:
                raise RegistryError("the server's answer is too large: use a smaller --limit")
            if time.monotonic() > ends_s:
                raise TimeoutError("the answer did not come to its end")
    return bytes(answer)
