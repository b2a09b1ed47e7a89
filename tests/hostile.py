"""Hostile clients over raw sockets, for the tests of the HTTP edge and of the whole server.

Each attack is a coroutine that returns what the server made of it: the first line's status of each
answer, `closed` where the connection was ended without one, `held` where the server still waits.
`source` is the address they come from: on Linux any of 127.0.0.0/8 will do, so that attackers and
others differ. Lives here: bytes and pauses. Does not: any judgement.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Outcomes: TypeAlias = Counter[str]
Attack: TypeAlias = Callable[["Site"], Awaitable[Outcomes]]

PATH = "/v1/chat/completions"
READ_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Site:
    """Whom it is about. `key`: of a tenant of the attacker's own; `patience_s`: how long the server
    may take to end what does not come on."""

    port: int
    key: str
    model: str
    source: str = "127.0.0.2"
    patience_s: float = READ_TIMEOUT_S
    scale: int = 1

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection from `source`."""
        return await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(self.source, 0), limit=1 << 20
        )

    def head(self, length: int | None, extra: str = "") -> bytes:
        """Of a POST with the key; `length` None: chunked."""
        how = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        return (
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\n{how}\r\n{extra}\r\n"
        ).encode()


async def outcome(reader: asyncio.StreamReader, patience_s: float) -> str:
    """What came of a connection; all of it is read."""
    try:
        async with asyncio.timeout(patience_s):
            line = await reader.readline()
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return "held"
    except (ConnectionError, ValueError):
        return "closed"
    return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"


async def send(site: Site, parts: Sequence[bytes], pause_s: float = 0.0, half: bool = False) -> str:
    """The parts over one connection, as far as the server takes them. `half`: then no more is to be
    sent, while the answer is still read."""
    try:
        reader, writer = await site.open()
    except OSError:
        return "closed"
    try:
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if half:
                writer.write_eof()
        except (ConnectionError, OSError):
            pass
        return await outcome(reader, site.patience_s)
    finally:
        writer.close()


async def slow_heads(site: Site) -> Outcomes:
    """Slow-loris: a head that comes byte by byte and never ends."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 10_000
    parts = [head[n : n + 1] for n in range(len(head))]
    return Counter(
        await asyncio.gather(*(_until_ended(site, parts, 0.1) for _ in range(20 * site.scale)))
    )


async def slow_bodies(site: Site) -> Outcomes:
    """A body that comes byte by byte and never ends."""
    parts = [site.head(100_000), *[b" "] * 100_000]
    return Counter(
        await asyncio.gather(*(_until_ended(site, parts, 0.1) for _ in range(20 * site.scale)))
    )


async def _until_ended(site: Site, parts: Sequence[bytes], pause_s: float) -> str:
    """Parts with pauses while the server keeps the connection."""
    reader, writer = await site.open()
    ended = asyncio.create_task(outcome(reader, site.patience_s))
    try:
        for part in parts:
            writer.write(part)
            done, _ = await asyncio.wait([ended], timeout=pause_s)
            if done:
                break
        return await ended
    finally:
        writer.close()


async def large_bodies(site: Site) -> Outcomes:
    """100 MB, told beforehand and not."""
    part, count = b" " * (1 << 20), 100
    chunk = b"%x\r\n%b\r\n" % (len(part), part)
    found = [await send(site, [site.head(count << 20), *[part] * count])]
    found.append(await send(site, [site.head(None), *[chunk] * count]))
    return Counter(found)


async def bad_bodies(site: Site) -> Outcomes:
    """Deep JSON, invalid UTF-8, what is no JSON, wrong lengths."""
    chat = b'{"model": "%b", "messages": ' % site.model.encode()
    said = chat + b'[{"role": "user", "content": "'
    bodies = [
        chat + b"[" * 1_000_000,
        chat + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
        said + b'\xff\xfe\xc3\x28"}]}',
        said + b'\xed\xa0\x80"}]}',
        said + b'\\ud800"}]}',
        b"\x00" * 1000,
        b"",
        b"null",
        b'{"model": 1e999}',
        chat + b"[]" + b" " * 100_000 + b"}",
    ]
    ends = "Connection: close\r\n"
    return Counter([await send(site, [site.head(len(b), ends) + b]) for b in bodies])


async def header_floods(site: Site) -> Outcomes:
    """Heads without end, many lines and long ones, and a body's trailers."""
    line = b"X-Flood: " + b"a" * 200 + b"\r\n"
    start = b"GET /v1/models HTTP/1.1\r\n"
    floods = [
        [start, *[line * 100] * 50],
        [start + b"X: ", *[b"a" * 100_000] * 20],
        [b"GET /" + b"a" * 200_000],
        [site.head(None) + b"1\r\n \r\n0\r\n", *[line * 100] * 50],
        [b"\r\n" * 500_000],
    ]
    return Counter([await send(site, parts) for parts in floods])


async def no_http(site: Site) -> Outcomes:
    """Other protocols, contradictions, smuggled requests."""
    both = (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n"
    )
    texts = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + both,
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA\x00b: c\r\n\r\n",
        site.head(None) + b"zz\r\nabc",
    ]
    return Counter([await send(site, [text], half=True) for text in texts])


async def half_closed(site: Site) -> Outcomes:
    """Clients that say they are done sending: in a head, in a body, after a whole request."""
    body = b'{"model": "%b", "messages": [{"role": "user", "content": "x"}]}' % site.model.encode()
    found = []
    for text in (b"GET /v1/mod", site.head(1000) + b"{", site.head(len(body)) + body):
        found.append(await send(site, [text], half=True))
    return Counter(found)


async def resets(site: Site) -> Outcomes:
    """Streams that are asked for and dropped at once."""
    body = (
        b'{"model": "%b", "stream": true, "messages": [{"role": "user", "content": "x"}]}'
        % site.model.encode()
    )
    for _ in range(20 * site.scale):
        _, writer = await site.open()
        writer.write(site.head(len(body)) + body)
        await writer.drain()
        writer.transport.abort()
    return Counter({"closed": 20 * site.scale})


ATTACKS: dict[str, Attack] = {
    "slow heads": slow_heads,
    "slow bodies": slow_bodies,
    "large bodies": large_bodies,
    "bad bodies": bad_bodies,
    "header floods": header_floods,
    "no HTTP": no_http,
    "half-closed": half_closed,
    "resets": resets,
}


async def crowd(site: Site, count: int, hold_s: float) -> Outcomes:
    """So many connections from one address at one time, each with one request; held a while."""
    ask = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    gate = asyncio.Semaphore(500)

    async def one() -> str:
        async with gate:
            try:
                reader, writer = await site.open()
                writer.write(ask)
                async with asyncio.timeout(site.patience_s):
                    line = await reader.readline()
            except (OSError, TimeoutError):
                return "closed"
        held.append(writer)
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"

    held: list[asyncio.StreamWriter] = []
    found = Counter(await asyncio.gather(*(one() for _ in range(count))))
    await asyncio.sleep(hold_s)
    for writer in held:
        writer.close()
    return found
