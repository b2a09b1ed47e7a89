"""An OpenAI-like server that answers by script, for testing the load generator and nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class Script:
    """How every request is answered. `fail_with` maps the n-th request (from 0) to a status."""

    chunks: list[str] = field(default_factory=lambda: [" one two", " three"])
    completion_tokens: int = 3
    first_delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    send_usage: bool = True
    echo_prompt: bool = False
    finish_reason: str = "length"
    error_event: bool = False
    fail_with: dict[int, int] = field(default_factory=dict)


@dataclass
class ScriptedServer:
    """What the server saw."""

    script: Script
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One chat completion."""
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            status = self.script.fail_with.get(number)
            if status is not None:
                error = {"error": {"code": "rate_limit_exceeded", "message": "slow down"}}
                return web.json_response(error, status=status)
            return await self._stream(request, self.bodies[-1])
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await _event(response, delta={"role": "assistant"})
        if self.script.echo_prompt:
            await _event(response, delta={"content": f"user: {body['messages'][0]['content']}"})
        await asyncio.sleep(self.script.first_delay_s)
        for index, chunk in enumerate(self.script.chunks):
            if index:
                await asyncio.sleep(self.script.chunk_delay_s)
            await _event(response, delta={"content": chunk})
        if self.script.error_event:
            await response.write(b'data: {"error": {"code": "worker_lost"}}\n\n')
            return response
        if self.script.finish_reason:
            await _event(response, delta={}, finish_reason=self.script.finish_reason)
        if self.script.send_usage:
            usage = {"prompt_tokens": 7, "completion_tokens": self.script.completion_tokens}
            await response.write(
                b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\r\n\r\n"
            )
        await response.write(b"data: [DONE]\n\n")
        return response


async def _event(response: web.StreamResponse, **choice: Any) -> None:
    chunk = {"choices": [{"index": 0, **choice}]}
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@asynccontextmanager
async def scripted_server(script: Script) -> AsyncIterator[ScriptedServer]:
    """Run it on a free port."""
    server = ScriptedServer(script)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    test_server = TestServer(app)
    await test_server.start_server()
    server.base_url = str(test_server.make_url("")).rstrip("/")
    try:
        yield server
    finally:
        await test_server.close()
