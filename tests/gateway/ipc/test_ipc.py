"""Channels between processes: order, bounds, ends. Over real sockets, in one process."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.ipc import ipc
from gateway.ipc.ipc import Channel

DECODER = msgspec.msgpack.Decoder(list[int])


class Ends:
    """Two ends of a connection and what they heard."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.lost: list[str] = []
        self.ours: Channel[int, int] = Channel(DECODER)
        self.theirs: Channel[int, int] = Channel(DECODER)
        self.theirs.on_message = self.heard.append
        self.theirs.on_lost = self.lost.append
        self.ours.on_lost = self.lost.append


async def connected(path: Path) -> Ends:
    ends = Ends()
    await ipc.connect(path, ends.ours)
    return ends


async def until(condition: object) -> None:
    assert callable(condition)
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


async def test_messages_come_in_order_and_large_ones_whole(tmp_path: Path) -> None:
    ends = Ends()
    async with ipc.listening(tmp_path / "s", lambda: ends.theirs):
        await ipc.connect(tmp_path / "s", ends.ours)
        for number in range(50_000):
            ends.ours.send(number)
            if number == 10:
                await asyncio.sleep(0)
        await until(lambda: len(ends.heard) == 50_000)
        assert ends.heard == list(range(50_000))
        ends.ours.send(-1)
        ends.ours.close()
        ends.ours.send(-2)
        await until(lambda: ends.lost)
        assert ends.heard[-1] == -1
        assert len(ends.lost) == 1  # the one who closes is not told


@pytest.mark.parametrize(
    "sent",
    [
        (ipc.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x02\x91\xc0",
        b"\x00\x00\x00\x00",
    ],
)
async def test_what_is_no_message_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    ends = Ends()
    async with ipc.listening(tmp_path / "s", lambda: ends.theirs):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(sent)
        await until(lambda: ends.lost)
        assert ends.heard == []
        assert ends.theirs.closed
        writer.close()


async def test_a_frame_may_come_byte_by_byte(tmp_path: Path) -> None:
    ends = Ends()
    async with ipc.listening(tmp_path / "s", lambda: ends.theirs):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        body = msgspec.msgpack.encode([1, 2, 3])
        for byte in (len(body).to_bytes(4, "big") + body) * 2:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await until(lambda: ends.heard == [1, 2, 3, 1, 2, 3])
        writer.close()
        await until(lambda: ends.lost)


async def test_who_does_not_read_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_UNSENT_BYTES", 1 << 20)
    ends = Ends()

    writers: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_unix_server(silent, str(tmp_path / "s"))
    await ipc.connect(tmp_path / "s", ends.ours)
    for _ in range(200):
        for number in range(10_000):
            ends.ours.send(number)
        await asyncio.sleep(0)
        if ends.ours.closed:
            break
    await until(lambda: ends.lost == ["it does not read"])
    server.close()
    for writer in writers:
        writer.close()
    await asyncio.sleep(0)


async def test_nobody_there_is_an_error_and_an_old_socket_is_taken_over(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await connected(tmp_path / "s")
    (tmp_path / "s").touch()
    ends = Ends()
    async with ipc.listening(tmp_path / "s", lambda: ends.theirs):
        await ipc.connect(tmp_path / "s", ends.ours)
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
        ends.ours.lose("enough")
        await until(lambda: len(ends.lost) == 2)
        assert "enough" in ends.lost
