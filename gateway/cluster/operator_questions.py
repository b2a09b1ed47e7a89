"""Operators' questions on a server whose dispatcher is not the active one: asked of that one.

Commands and pages ask the control socket of their own server (ipc/control_socket.py). Where several
servers have one dispatcher, the candidate that waits there passes the question on to whoever the
lease's row names, over the connection that gateways have too, and hands the answer back as it came.
"""

import asyncio
from typing import Any

import msgspec

from gateway.cluster.dispatcher_lease import DispatcherLease
from gateway.cluster.dispatcher_places import CONNECT_S
from gateway.cluster.dispatcher_protocol import (
    ForwardedAnswer,
    ForwardedQuestion,
    ToDispatcher,
    ToGateway,
    to_gateway,
)
from gateway.ipc import remote
from gateway.ipc.ipc import Channel
from gateway.ipc.remote import TlsContexts
from gateway.settings.cluster_settings import split_address

ANSWER_S = 4.0
"""Less than whoever asked waits."""


class QuestionForwarder:
    """Implements ControlHandler."""

    def __init__(self, lease: DispatcherLease, tls: TlsContexts) -> None:
        self._lease = lease
        self._tls = tls

    async def answer(self, line: bytes) -> dict[str, Any]:
        """The active dispatcher's, or an error that says where it is."""
        seen = self._lease.seen
        if seen is None:
            return {"error": "no server has the dispatcher yet: try again in a moment"}
        try:
            text = await ask(split_address(seen.address), self._tls, line)
            found: dict[str, Any] = msgspec.json.decode(text)
        except (OSError, msgspec.DecodeError) as error:
            return {
                "error": f"the dispatcher of another server, at {seen.address}, does not answer "
                f"({error or 'time is up'}): try again in a moment"
            }
        return found


async def ask(address: tuple[str, int], tls: TlsContexts, line: bytes) -> bytes:
    """The answer's JSON. Raises OSError (a TimeoutError is one) where none comes."""
    channel: Channel[ToGateway, ToDispatcher] = Channel(to_gateway)
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def hear(message: ToGateway) -> None:
        if isinstance(message, ForwardedAnswer) and not answer.done():
            answer.set_result(message.text)

    def lose(reason: str) -> None:
        if not answer.done():
            answer.set_exception(ConnectionError(reason))

    channel.on_message, channel.on_lost = hear, lose
    await remote.connect(address, tls, channel, CONNECT_S)
    try:
        channel.send(ForwardedQuestion(line))
        async with asyncio.timeout(ANSWER_S):
            return await answer
    finally:
        channel.close()
