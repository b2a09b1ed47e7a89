"""LiteLLM's proxy and the upstream behind it, for `bench.gateway`.

`python -m bench.gateway_peer PORT [STEP_S]` is that upstream: an OpenAI-like server that answers at
once, streamed answers a chunk every STEP_S. It writes bytes made beforehand, so it is also what the
client's own time is measured against. `start_litellm` runs the peer from its own environment.

Lives here: mock and peer as processes. Does not: load, figures.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import uvloop

from bench.processes import ServerProcess, free_port

NAME = "litellm"
START_TIMEOUT_S = 180.0
KEY = "sk-bench-litellm"
NUM_CHUNKS = 64
_HEAD = {"id": "chatcmpl-mock", "created": 1, "model": "mock"}


def whole_answer() -> bytes:
    """A chat that is not streamed, as HTTP."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * 16},
        "finish_reason": "length",
    }
    usage = {"prompt_tokens": 12, "completion_tokens": 16, "total_tokens": 28}
    body = {**_HEAD, "object": "chat.completion", "choices": [choice], "usage": usage}
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


def chunk(delta: Mapping[str, str], finish_reason: str | None = None) -> bytes:
    """A chunk of a stream, in its chunk of HTTP."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    body = {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upstream(asyncio.Protocol):
    """One connection to the mock."""

    step_s = 0.02
    whole = whole_answer()
    word = chunk({"content": "word "})
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """A request, or a part of one."""
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        if len(body) < length:
            return
        self._buffer = body[length:]
        assert self._transport is not None
        if b'"stream":true' in body.replace(b" ", b""):
            self._transport.write(self.head + chunk({"role": "assistant"}))
            self._next(NUM_CHUNKS)
        else:
            self._transport.write(self.whole)

    def _next(self, left: int) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(self.word)
            asyncio.get_running_loop().call_later(self.step_s, self._next, left - 1)
            return
        done = b"data: [DONE]\n\n"
        last = chunk({}, "length") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done)
        self._transport.write(last)


def start_upstream(work_dir: Path) -> tuple[ServerProcess, int]:
    """The mock on a free port."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.gateway_peer", str(port)]
    process = ServerProcess("mock upstream", argv, work_dir / "bench-mock.log")
    process.wait_ready(f"http://127.0.0.1:{port}/", START_TIMEOUT_S)
    return process, port


def start_litellm(python: Path, upstream_port: int, work_dir: Path) -> tuple[ServerProcess, int]:
    """Its proxy with one model, a master key and nothing else asked of it: no database, no logs."""
    config = {
        "model_list": [
            {
                "model_name": "mock",
                "litellm_params": {
                    "model": "openai/mock",
                    "api_base": f"http://127.0.0.1:{upstream_port}/v1",
                    "api_key": "none",
                },
            }
        ],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"telemetry": False},
    }
    path = work_dir / "litellm.json"
    path.write_text(json.dumps(config))
    port = free_port()
    program = str(python.parent / "litellm")
    argv = [program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    env = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = ServerProcess(NAME, argv, work_dir / "bench-litellm.log", env)
    try:
        process.wait_ready(f"http://127.0.0.1:{port}/health/liveliness", START_TIMEOUT_S)
    except BaseException:
        process.stop()
        raise
    return process, port


async def _serve(port: int, step_s: float) -> None:
    Upstream.step_s = step_s
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.02))
