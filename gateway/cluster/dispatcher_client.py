"""A gateway's connection to the dispatcher, whichever that is now (stage 5).

    down --connected, Hello sent--> open --Welcome--> up
    open, up --it ended, silence, an earlier epoch--> down

`DispatcherLink` is what both kinds of connections are: where gateway and dispatcher are one
process, it is opened once (local_dispatcher.py). `SocketLink` tries again every RETRY_S while
nobody listens, at one place after the other where there are several servers. What is to be said in
a Hello the owner is asked for at each connect; what is sent while it is down is dropped, for the
next Hello says it. Knows no requests (dispatcher_proxy.py) and no limits (remote_limits.py).
"""

import asyncio
import logging
import math
import ssl
from collections.abc import Callable

from gateway.cluster.dispatcher_places import DispatcherPlaces
from gateway.cluster.dispatcher_protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    Hello,
    Ping,
    ToDispatcher,
    ToGateway,
    Welcome,
    to_gateway,
)
from gateway.ipc import ipc, remote

logger = logging.getLogger(__name__)

RETRY_S = 0.05
EARLIER_RETRY_S = 0.25
"""After one that is not the one to speak to: it has to end first."""
TELL_S = 60.0
"""How often trouble with certificates is logged."""
MANY_ENDED = 5
"""So often in a row a server that is being stopped does not end connections."""
WELCOME_S = 2.0
"""Where another server may have the dispatcher, one that does not answer a Hello is left."""
REMOTE_SILENCE_S = 3.0
"""So is one on another machine that is silent, which may be gone."""


class DispatcherLink:
    """Listeners are set before it is opened: `hello` makes one, `on_message` hears all but Welcome,
    `on_up` that a dispatcher took the Hello (with whether it is another one than before), and
    `on_down` that it is gone."""

    def __init__(self) -> None:
        self._channel: ipc.MessageChannel[ToGateway, ToDispatcher] | None = None
        self.epoch = 0
        """Of the dispatcher that was spoken to last."""
        self.is_up = False
        self._met_earlier = False
        self.hello: Callable[[], Hello]
        self.on_message: list[Callable[[ToGateway], None]] = []
        self.on_up: list[Callable[[bool], None]] = []
        self.on_down: list[Callable[[], None]] = []

    def open(self, channel: ipc.MessageChannel[ToGateway, ToDispatcher]) -> None:
        """Say Hello on this connection and go by it until it ends."""
        self.hear(channel)
        self._channel = channel
        channel.send(self.hello())

    def hear(self, channel: ipc.MessageChannel[ToGateway, ToDispatcher]) -> None:
        """Go by what is said there."""
        channel.on_message = lambda message: self._receive(channel, message)
        channel.on_lost = lambda reason: self._down(channel, reason)

    def send(self, message: ToDispatcher) -> None:
        """Queue a message; dropped while there is no connection."""
        if self._channel is not None:
            self._channel.send(message)

    def close(self) -> None:
        """Say nothing more; what was said gets out."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self.is_up = None, False

    def _receive(
        self, channel: ipc.MessageChannel[ToGateway, ToDispatcher], message: ToGateway
    ) -> None:
        if not isinstance(message, Welcome):
            for hear in self.on_message:
                hear(message)
        elif message.version != PROTOCOL_VERSION:
            channel.lose(f"it speaks version {message.version}, not {PROTOCOL_VERSION}")
        elif message.epoch < self.epoch:
            self._met_earlier = True
            channel.lose(f"it is an earlier one, {message.epoch} after {self.epoch}")
        else:
            is_other, self.epoch = message.epoch != self.epoch, message.epoch
            self.is_up = True
            logger.info("dispatcher connected epoch=%d", message.epoch)
            for hear_up in self.on_up:
                hear_up(is_other)

    def _down(self, channel: ipc.MessageChannel[ToGateway, ToDispatcher], reason: str) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        if self.is_up:
            self.is_up = False
            logger.warning("dispatcher lost epoch=%d: %s", self.epoch, reason)
        for hear in self.on_down:
            hear()


class SocketLink(DispatcherLink):
    """Connected by `run`, to whoever listens at one of the `places`."""

    def __init__(self, places: DispatcherPlaces, silence_s: float) -> None:
        super().__init__()
        self._places = places
        self._silence_s = silence_s
        self._lost = asyncio.Event()
        self._at: str | None = None
        self._told_s: dict[str, float] = {}
        self._num_ended = 0
        self._next = 0

    def moved(self, address: str, epoch: int) -> None:
        """The dispatcher of this epoch is there, as their election says. Leave an earlier one."""
        self._places.known = address
        if epoch > self.epoch and address != self._at:
            self._next = 0
            if self._channel is not None:
                self._channel.lose(f"the dispatcher of epoch {epoch} is at {address}")

    async def run(self) -> None:
        """Stay connected for ever."""
        try:
            while True:
                addresses = self._places.in_order()
                address = addresses[self._next % len(addresses)]
                self._next += 1
                await self._connect_once(address)
                self._at = None
                await asyncio.sleep(EARLIER_RETRY_S if self._met_earlier else RETRY_S)
                self._met_earlier = False
        finally:
            self.close()

    async def _connect_once(self, address: str) -> None:
        channel: ipc.Channel[ToGateway, ToDispatcher] = ipc.Channel(to_gateway)
        self._lost.clear()
        self.hear(channel)
        try:
            await self._places.connect(address, channel)
        except ssl.SSLError as error:
            self._tell_tls(address, str(error))
            return
        except OSError:
            return
        if channel.closed:
            return
        self._at = address
        self.open(channel)
        silence_s, began_s = self._silence_s, asyncio.get_running_loop().time()
        if not self._places.is_own(address):
            silence_s = min(silence_s, REMOTE_SILENCE_S)
        while not self._lost.is_set():
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._lost.wait()
            except TimeoutError:
                channel.send(Ping())
                waited_s = asyncio.get_running_loop().time() - began_s
                if self.is_up:
                    self._next = 0
                elif self._places.are_several and waited_s > WELCOME_S:
                    channel.lose("it does not answer")
                if channel.silent_s > silence_s:
                    channel.lose(f"silent for {silence_s:.0f} s")

    def _tell_tls(self, address: str, text: str) -> None:
        """At first, and again while it lasts: an operator has to do something."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s.get(address, -math.inf) >= TELL_S:
            self._told_s[address] = now_s
            logger.error("no TLS with the server at %s (%s): %s", address, text, remote.ADVICE)

    def _down(self, channel: ipc.MessageChannel[ToGateway, ToDispatcher], reason: str) -> None:
        self._lost.set()
        if self.is_up:
            self._num_ended = 0
        elif self._at is not None and not self._places.is_own(self._at):
            # A server that refuses a certificate ends the connection after the handshake (TLS 1.3).
            self._num_ended += reason == "it ended" or "Err" in reason or "SSL" in reason
            if self._num_ended >= MANY_ENDED:
                self._tell_tls(self._at, f"it ends connections before it answers: {reason}")
        super()._down(channel, reason)
