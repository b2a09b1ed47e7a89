"""What the edge's tests share: a small real tokenizer, a scripted dispatcher, a recording ledger.

The dispatcher hands out the gateway's own `RequestStream`, so that what the pipeline sees between
itself and a worker is the real thing; only the worker's words are written here.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from admin.app import AdminApp
from admin.web.headers import PREFIX
from engine.protocol import (
    Finish,
    FinishReason,
    SwapRecord,
    TokenLogprobs,
    Usage,
    WorkerStatus,
)
from gateway.auth.directory import Directory
from gateway.cache.embedder import EmbeddingWorker
from gateway.dispatch.tickets import RequestStream, StreamEnd
from gateway.errors import ApiError
from gateway.http.acceptor import Connections
from gateway.http.app import Application, create_app
from gateway.http.http_protocol import http_config
from gateway.http.http_server import AcceptingServer
from gateway.http.post import ClientWatch
from gateway.limits.store import MemoryStore
from gateway.metrics.families import MetricsRegistry
from gateway.pipeline.edge import Edge, build_edge
from gateway.pipeline.pipeline import Services
from gateway.pricing.policy.pricing import PriceBook, Prices
from gateway.protocols import DispatcherSnapshot, LedgerSnapshot
from gateway.sealing.master_keys import ensure_keys
from gateway.settings.settings import Settings
from gateway.text.prepare_pool import PreparePool
from gateway.types import HostedModel, ModelOutlook, PreparedRequest, Principal
from registry.accounts.api_keys import KEY_PREFIX, KeyRecord, public_id_of
from registry.accounts.key_terms import KeyCache
from registry.accounts.quotas import Limits
from registry.money.ledger import OpenRecord, Posting
from tests.gateway.prepare_kit import shared_pool

KEY = "test-key-for-everything"
PLENTY = Limits(max_concurrency=10**6)
"""Of the gateway: every request holds a reservation, and none is refused."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] | trim) }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "Elementary, my dear Watson. The game is afoot! " * 4,
    "def main():\n    return [x for x in range(10)]\n" * 4,
    "naïve café, Ångström; 日本語のテキスト; 😀👍 émigré " * 4,
]


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE with two control tokens, one tool marker that is none, trained in a moment."""
    return Tokenizer.from_str(_trained())


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    text: str = tokenizer.to_str()
    return text


def spm_like_tokenizer() -> Tokenizer:
    """Like sentencepiece's: words begin with a low line, bytes as fallback, one space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted({c for text in CORPUS[:2] for c in text if c.isalpha()})
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters])}
    merges = []
    for left, right in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "s"), ("▁", "a")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_model(folder: Path, template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """The files of a pack that the gateway reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return tokenizer


def key_record(
    plaintext: str = KEY,
    key_id: str = "key_1",
    limits: Limits | None = None,
    cache_mode: str = "off",
    cache: KeyCache | None = None,
    allowed_models: frozenset[str] | None = None,
    expires_at: float | None = None,
    revoked_at: float | None = None,
    tenant_id: str = "ten_1",
) -> KeyRecord:
    """A key as the registry's poll would bring it."""
    salt = b"0123456789abcdef"
    ours = plaintext.startswith(KEY_PREFIX)
    secret = plaintext.split("-", 3)[3] if ours else plaintext
    return KeyRecord(
        id=key_id,
        public_id=public_id_of(plaintext),
        tenant_id=tenant_id,
        tenant_name="tenant",
        tenant_weight=1.0,
        tenant_disabled=False,
        name="key",
        scopes=frozenset({"inference"}),
        limits=limits or Limits(),
        cache=cache or KeyCache(cache_mode),
        allowed_models=allowed_models,
        created_at=0.0,
        expires_at=expires_at,
        revoked_at=revoked_at,
        salt=salt,
        digest=hashlib.sha256(salt + secret.encode()).digest(),
    )


PRICES = Prices(prompt_nanos=2, cached_nanos=1, completion_nanos=5)


def hosted_model(folder: Path, name: str = "tiny", max_context: int = 256) -> HostedModel:
    """A catalog entry over `write_model`'s files."""
    return HostedModel(
        name=name,
        revision=f"rev-{name}-0123456789",
        pack_dir=str(folder),
        max_context=max_context,
        vocab_size=403,
        created_at=1_700_000_000,
    )


@dataclass
class Running:
    """One request in the scripted dispatcher: the request and the worker's end of its stream."""

    request: PreparedRequest
    principal: Principal
    stream: RequestStream
    num_sent: int = 0
    aborted: bool = False

    def say(self, token_ids: list[int]) -> None:
        """Tokens come from the worker, with the scores that were asked for."""
        request, is_first = self.request, not self.num_sent
        self.num_sent += len(token_ids)
        wanted = 0 if request.is_judged else request.logprobs
        scores = [score(i, wanted) for i in token_ids] if wanted >= 0 else []
        prompt = []
        if is_first and request.prompt_logprobs >= 0:
            prompt = [score(i, request.prompt_logprobs) for i in request.prompt_token_ids[1:]]
        self.stream.put(token_ids, scores, prompt)

    def end(
        self,
        reason: FinishReason,
        cached_tokens: int = 0,
        error: str = "",
        service_s: float = 0.25,
    ) -> None:
        """The finish comes, telling what was said."""
        usage = Usage(len(self.request.prompt_token_ids), cached_tokens, self.num_sent, service_s)
        self.stream.finish(Finish(reason, usage, error))

    def answer(self, rows: np.ndarray[Any, Any] | bytes, service_s: float = 0.25) -> None:
        """An encoder's rows come from the worker, with the finish."""
        vectors = rows if isinstance(rows, bytes) else rows.astype("<f4").tobytes()
        usage = Usage(len(self.request.prompt_token_ids), 0, 0, service_s)
        self.stream.finish(Finish("stop", usage), vectors)

    def fail(self, error: Exception) -> None:
        """The stream ends without a finish."""
        end: StreamEnd = error
        self.stream.finish(end)


def score(token_id: int, num_top: int) -> TokenLogprobs:
    """What the scripted worker says of a token: less likely the higher its id."""
    top = [(n, -0.25 * (n + 1)) for n in range(num_top)]
    return TokenLogprobs(-0.01 * token_id, top)


Script = Callable[[Running], None]


def silent(running: Running) -> None:
    """A script: the worker says nothing until the test does."""
    del running


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it, at most five seconds."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class ScriptedDispatcher:
    """Runs `script` for each request as soon as it is queued. An abort ends a request at once."""

    def __init__(self) -> None:
        self.script: Script = lambda running: running.end("stop")
        self.refusal: Exception | None = None
        self.is_ready = True
        self.requests: list[Running] = []
        self.came = asyncio.Event()
        self.max_buffer_tokens = 4096
        self.listeners: list[Callable[[str, SwapRecord], None]] = []
        self.statuses: list[WorkerStatus] = []
        self.stopping = False

    @property
    def ready(self) -> bool:
        return self.is_ready

    def run(self, request: PreparedRequest, principal: Principal) -> RequestStream:
        if self.refusal is not None:
            raise self.refusal

        def abort() -> None:
            running.aborted = True
            running.end("abort")

        stream = RequestStream(self.max_buffer_tokens, abort, lambda: 0.125)
        running = Running(request, principal, stream)
        self.requests.append(running)
        self.came.set()
        self.script(running)
        return stream

    def snapshot(self) -> DispatcherSnapshot:
        return DispatcherSnapshot(
            num_waiting=1,
            num_running=2,
            waiting_by_model={"tiny": 1},
            running_by_model={"tiny": 2},
            waiting_by_tenant={"ten_1": 1},
            service_s_by_tenant={"ten_1": 3.5},
            num_queue_rejections=0,
            num_queue_timeouts=0,
            num_retries=0,
            num_workers_lost=1,
            num_late_messages=0,
            num_clients_too_slow=0,
            quarantined={},
        )

    def worker_statuses(self) -> list[WorkerStatus]:
        return self.statuses

    def model_failure(self, model_name: str) -> str | None:
        del model_name
        return None

    def model_outlook(self, model_name: str) -> ModelOutlook:
        return ModelOutlook("resident" if model_name == "tiny" else "cold", 0.0)

    def add_swap_listener(self, listener: Callable[[str, SwapRecord], None]) -> None:
        self.listeners.append(listener)


@dataclass
class RecordingLedger:
    """Keeps what the pipeline writes, and refuses what a ledger must never see."""

    opened: list[OpenRecord] = field(default_factory=list)
    posted: list[Posting] = field(default_factory=list)
    voided: list[str] = field(default_factory=list)
    checkpoints: list[tuple[str, int]] = field(default_factory=list)
    open_error: ApiError | None = None
    delay_s: float = 0.0
    refuses: bool = False

    async def open(self, record: OpenRecord) -> None:
        if self.open_error is not None:
            raise self.open_error
        await asyncio.sleep(self.delay_s)
        self.opened.append(record)

    def checkpoint(self, request_id: str, streamed_tokens: int) -> None:
        assert request_id in {record.request_id for record in self.opened}
        self.checkpoints.append((request_id, streamed_tokens))

    async def post(self, posting: Posting) -> None:
        await asyncio.sleep(self.delay_s)
        ended = [*(p.request_id for p in self.posted), *self.voided]
        assert posting.request_id not in ended, "posted twice"
        self.posted.append(posting)

    async def void(self, request_id: str) -> None:
        ended = [*(p.request_id for p in self.posted), *self.voided]
        assert request_id not in ended, "voided after its end"
        self.voided.append(request_id)

    def snapshot(self) -> LedgerSnapshot:
        counts = (len(self.opened), len(self.posted), len(self.voided), 0, 0)
        return LedgerSnapshot(0, 0.0, *counts, refuses=self.refuses)

    @property
    def only(self) -> Posting:
        """The one posting there is."""
        assert len(self.posted) == 1, self.posted
        return self.posted[0]


@dataclass
class Kit:
    """An application over scripted neighbours, with the model `tiny` and the key KEY."""

    app: Application
    admin: AdminApp
    edge: Edge
    dispatcher: ScriptedDispatcher
    ledger: RecordingLedger
    directory: Directory
    model: HostedModel
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def end_id(self) -> int:
        """The model's stop token."""
        token_id = self.tokenizer.token_to_id("<|im_end|>")
        assert token_id is not None
        return token_id

    def speak(self, text: str, one_by_one: bool = True) -> Script:
        """A script: the worker says this text and stops."""

        def script(running: Running) -> None:
            ids = [*self.ids(text), self.end_id]
            for part in [[i] for i in ids] if one_by_one else [ids]:
                running.say(part)
            running.end("stop")

        return script

    def speak_slowly(self, text: str, pause_s: float = 0.01) -> Script:
        """The same, a token at a time with pauses, so that each is an event of its own."""

        def script(running: Running) -> None:
            call_later = asyncio.get_running_loop().call_later
            ids = [*self.ids(text), self.end_id]
            for n, token_id in enumerate(ids):
                call_later(n * pause_s, running.say, [token_id])
            call_later(len(ids) * pause_s, running.end, "stop")

        return script

    def use_keys(self, *keys: KeyRecord) -> None:
        """Replace the keys."""
        self.directory.replace(self.directory.version + 1, keys, self.directory.models(), PLENTY)

    async def begun(self) -> Running:
        """The next request that reaches the dispatcher."""
        await asyncio.wait_for(self.dispatcher.came.wait(), 5)
        self.dispatcher.came.clear()
        return self.dispatcher.requests[-1]

    async def settled(self, num: int = 1) -> None:
        """Wait until so many requests have ended in the ledger and hold nothing."""
        ledger = self.ledger
        await until(
            lambda: len(ledger.posted) + len(ledger.voided) >= num and not self.edge.store.num_open
        )
        self.check_closed()

    def check_closed(self) -> None:
        """Nothing is held any more: every request that was opened has ended."""
        assert isinstance(self.edge.store, MemoryStore)
        self.edge.store.check_integrity()
        assert self.edge.store.num_open == 0
        ended = {*(p.request_id for p in self.ledger.posted), *self.ledger.voided}
        assert {record.request_id for record in self.ledger.opened} <= ended


def make_kit(
    folder: Path,
    template: str | None = CHAT_TEMPLATE,
    max_context: int = 256,
    embedding: EmbeddingWorker | None = None,
    pool: PreparePool | None = None,
    owner: str = "",
    **settings: Any,
) -> Kit:
    """An application; close its edge when done."""
    tokenizer = write_model(folder, template)
    directory, dispatcher, ledger = Directory(), ScriptedDispatcher(), RecordingLedger()
    model = hosted_model(folder, max_context=max_context)
    book = PriceBook({model.name: [(0.0, PRICES)]})
    directory.replace(1, [key_record()], [model], PLENTY, book)
    own = {"default_max_tokens": 32, "metrics_token": "*", "data_dir": str(folder / "data")}
    services = Services(
        settings=Settings(**{**own, **settings}),
        directory=directory,
        dispatcher=dispatcher,
        ledger=ledger,
        metrics_registry=MetricsRegistry(),
        embedding_worker=embedding,
        owner=owner,
    )
    ensure_keys(services.settings)
    edge = build_edge(services, pool=pool or shared_pool())
    admin = AdminApp(edge)
    app = create_app(services, {PREFIX: lambda _: admin}, edge)
    return Kit(app, admin, edge, dispatcher, ledger, directory, model, tokenizer)


class _Server(AcceptingServer):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self.is_over = asyncio.Event()

    async def main_loop(self) -> None:
        """Uvicorn's looks whether it should end every 0.1 s; tests have many servers."""
        await self.is_over.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@contextlib.asynccontextmanager
async def serving(
    app: Any, settings: Settings | None = None, connections: Connections | None = None
) -> AsyncIterator[str]:
    """The application behind a real server on loopback; yields its address."""
    # With its protocol named, or asyncio leaves Nagle's algorithm on: 40 ms an answer.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        server = _Server(http_config(app, settings or Settings(), 20.0, connections))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.is_up.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.is_over.set()
            await task


@dataclass
class FakeConnection:
    """Implements post.ClientConnection; the test says when it is full, drained or gone."""

    is_full: bool = False
    is_gone: bool = False
    has_body: bool = True
    chunks: list[bytes] = field(default_factory=list)
    watches: list[ClientWatch] = field(default_factory=list)

    def write_chunk(self, data: bytes) -> None:
        self.chunks.append(data)

    def watch(self, watch: ClientWatch) -> None:
        self.watches.append(watch)

    def unwatch(self, watch: ClientWatch) -> None:
        if watch in self.watches:
            self.watches.remove(watch)

    def drain(self) -> None:
        """The client reads again."""
        self.is_full = False
        for watch in list(self.watches):
            watch.on_drained()

    def leave(self) -> None:
        """The client goes away."""
        self.is_gone, self.is_full = True, False
        for watch in list(self.watches):
            watch.on_gone()


@dataclass
class Client:
    """aiohttp with the address and the key filled in."""

    session: aiohttp.ClientSession
    base: str

    def post(self, path: str, body: Any, key: str = KEY, **headers: str) -> Any:
        """POST a JSON value, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        merged = {
            "authorization": f"Bearer {key}",
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        return self.session.post(self.base + path, data=data, headers=merged)

    async def chat(self, content: str = "Hello", **body: Any) -> tuple[int, dict[str, Any]]:
        """A chat of one message that is not streamed: status and body."""
        message = {"role": "user", "content": content}
        request = {"model": "tiny", "messages": [message], **body}
        async with self.post("/v1/chat/completions", request) as answer:
            return answer.status, await answer.json()

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """A streamed answer: the decoded events, "[DONE]" as text."""
        async with self.post(path, {**body, "stream": True}, **headers) as answer:
            assert answer.status == 200, await answer.text()
            return parse_events(await answer.read())


def parse_events(raw: bytes) -> list[Any]:
    """Server-sent events as JSON."""
    blocks = [block for block in raw.decode().split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in payloads]


@contextlib.asynccontextmanager
async def client_of(kit: Kit) -> AsyncIterator[Client]:
    """A client against the kit's application; afterwards nothing may be held."""
    async with serving(kit.app) as base, aiohttp.ClientSession() as session:
        yield Client(session, base)
    kit.check_closed()
