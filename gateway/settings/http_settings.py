"""Settings of HTTP, of the preparation of requests and of the operator's pages."""

import ipaddress
import re
from dataclasses import dataclass

from gateway.settings.base_settings import MIB, setting

OPEN = "*"
"""As `metrics_token`: none is needed; as `allowed_hosts`: any."""
REASONING_FIELDS = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}
UNKNOWN_FIELDS = ("refuse", "tell")
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_TOKEN = re.compile(r"[!-~]{16,512}")


def _check_proxy(text: str) -> None:
    """Raises ValueError: a name would be compared with addresses, and never be one."""
    if text == "*":
        return
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"trusted_proxies: {error}; list IP addresses or networks") from error


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Connections, bodies, streams, and how requests are prepared."""

    trusted_proxies: str = setting(
        "",
        "Addresses and networks of reverse proxies whose X-Forwarded-For header is trusted, "
        "separated by commas. `*`: all. Empty: none.",
    )
    allowed_hosts: str = setting(
        "",
        "Host names by which browsers reach the operator's pages, separated by commas, such as "
        "`polyhost.example.com` or `*.example.com`. IP addresses and localhost always work. "
        "`*`: all names. Empty: all names, but none if the server listens on loopback only and "
        "has no trusted_proxies.",
    )
    max_body_bytes: int = setting(
        8 * MIB, "Maximum size of a request body. Larger requests get 413.", ge=1
    )
    max_head_bytes: int = setting(
        65_536,
        "Maximum size of a request's URL and headers together. Larger requests get 431.",
        ge=1,
    )
    receive_timeout_s: float = setting(
        60.0,
        "How long the headers of a request may take to arrive (after that the connection is "
        "closed), and then its body (after that the request gets 408).",
        gt=0.0,
    )
    tls_cert_file: str = setting(
        "",
        "PEM file with the certificate chain. If set, the server uses TLS. The file is read "
        "again when it changes. Empty: no TLS.",
    )
    tls_key_file: str = setting(
        "", "PEM file with the private key. Empty: the key is in the certificate file."
    )
    cors_origins: str = setting(
        "",
        "Origins whose web pages may call the API, separated by commas, such as "
        "`https://app.example.com`. `*`: all. Empty: none.",
    )
    metrics_token: str = setting(
        "",
        "Bearer token that GET /metrics requires, at least 16 characters. `*`: none, so that "
        "everybody who reaches the server can read tenant ids, model names and token counts. "
        "Empty: /metrics is closed.",
    )
    metrics_silent_s: float = setting(
        3600.0,
        "GET /metrics leaves out the histograms of models that had no request for so long, so that "
        "a large catalog is not megabytes a scrape. Their counts are kept.",
        gt=0.0,
    )
    keep_alive_timeout_s: float = setting(
        30.0, "How long a connection may be idle between two requests before it is closed.", gt=0.0
    )
    max_connections: int = setting(
        20_000,
        "Maximum number of open connections. Further connections get 503. 0: unlimited.",
        ge=0,
    )
    max_connections_per_address: int = setting(
        2048,
        "Maximum number of open connections from one IPv4 address or one IPv6 /64 network that "
        "is not a trusted proxy. Further connections get 429. 0: unlimited.",
        ge=0,
    )
    connection_rate_per_address: float = setting(
        200.0,
        "New connections per second from one such address, with bursts of up to one second's "
        "worth. Further connections are delayed. 0: unlimited.",
        ge=0,
    )
    unknown_fields: str = setting(
        "refuse",
        "What happens to unknown top-level fields of a request: `refuse` them with 400, or `tell`: "
        "take them without effect and name them in the response header `x-polyhost-ignored`.",
    )
    ollama_key_id: str = setting(
        "",
        "Id of the API key (`polyhost keys list`) in whose name requests to Ollama's routes "
        "(`/api/chat` and others) run that send no key. Everybody who reaches the server can then "
        "use it: give it limits. Empty: these routes are off.",
    )
    reasoning_fields: str = setting(
        "both",
        "What chat completions call the reasoning of a model: `reasoning` (as vLLM and "
        "OpenRouter), `reasoning_content` (as DeepSeek), or `both`.",
    )
    default_max_tokens: int = setting(
        256, "Maximum number of generated tokens if a request does not set one.", ge=1
    )
    max_encode_inputs: int = setting(
        2048,
        "Maximum number of inputs in one request to embed or classify, or of documents in one "
        "request to rerank.",
        ge=1,
    )
    max_encode_tokens: int = setting(
        300_000,
        "Maximum number of tokens in all inputs of one request to embed, classify or rerank.",
        ge=1,
    )
    max_encode_answer_bytes: int = setting(
        256 * MIB,
        "Maximum memory for the responses to one tenant's requests to embed, classify or rerank, "
        "from the first result until the client has read everything. Further requests get 429 "
        "queue_full. One request may always run.",
        ge=1,
    )
    encode_piece_tokens: int = setting(
        4096,
        "Large requests to embed, classify or rerank are split into pieces of about this many "
        "tokens (whole inputs), with two pieces queued at a time, so that other requests are "
        "served in between.",
        ge=1,
        le=262_144,
    )
    max_choices: int = setting(16, "Maximum number of choices (`n`) in one request.", ge=1)
    max_prompts: int = setting(
        128,
        "Maximum number of answers to one completion request with several prompts: prompts times "
        "`n`.",
        ge=1,
    )
    max_stream_buffer_tokens: int = setting(
        2048,
        "Maximum number of tokens buffered for a client that does not read its stream. Beyond "
        "it, the request is aborted.",
        ge=1,
    )
    stream_write_timeout_s: float = setting(
        30.0, "How long sending one event may take before the client is disconnected.", gt=0.0
    )
    stream_heartbeat_s: float = setting(
        15.0,
        "After this long without an event, a stream sends a comment to keep the connection open. "
        "A stream still waiting for its first token then starts with status 200, and a later "
        "failure is sent as an error event. 0: never.",
        ge=0,
    )
    prepare_processes: int = setting(
        2,
        "Processes of each gateway process that render chat templates and tokenize. One of several "
        "is kept for short prompts.",
        ge=1,
    )
    prepare_cpu_s: float = setting(
        1.0,
        "CPU seconds that a model's chat template and tokenizer may take for one request, beside 4 "
        "seconds per MB of its text. Beyond that the request fails, and the tenant cannot ask this "
        "model for a while.",
        ge=0.01,
    )
    prepare_memory_bytes: int = setting(
        1024 * MIB,
        "Memory that a model's chat template and tokenizer may take for one request, beside 256 "
        "bytes per byte of its text.",
        ge=64 * MIB,
    )
    max_prepare_pending: int = setting(
        256,
        "Maximum number of requests in preparation or waiting for it. Beyond it, the latest of the "
        "tenant that has most of them get 429 queue_full.",
        ge=1,
    )
    max_tokenizers: int = setting(
        32, "Maximum number of models whose tokenizer and chat template stay in memory.", ge=1
    )

    def check_http(self) -> None:
        """Raises ValueError where fields contradict one another, or name what is not."""
        for proxy in filter(None, (p.strip() for p in self.trusted_proxies.split(","))):
            _check_proxy(proxy)
        for name in filter(None, (n.strip() for n in self.allowed_hosts.split(","))):
            if name != OPEN and not _HOST.fullmatch(name):
                raise ValueError(f"allowed_hosts: {name!r} is not a host name: remove its port")
        if self.unknown_fields not in UNKNOWN_FIELDS:
            raise ValueError(f"unknown_fields must be one of {', '.join(UNKNOWN_FIELDS)}")
        if self.reasoning_fields not in REASONING_FIELDS:
            raise ValueError(f"reasoning_fields must be one of {', '.join(REASONING_FIELDS)}")
        if self.metrics_token not in ("", OPEN) and not _TOKEN.fullmatch(self.metrics_token):
            raise ValueError(
                "metrics_token must have 16 to 512 visible ASCII characters: choose another"
            )
        if self.tls_key_file and not self.tls_cert_file:
            raise ValueError("tls_key_file needs tls_cert_file: set both")


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """The operator's pages."""

    admin_session_s: float = setting(
        43_200.0,
        "Maximum length of a session on the operator's pages. After that the user must sign in "
        "again.",
        gt=0.0,
    )
    admin_idle_s: float = setting(
        3600.0, "How long such a session may be idle before it ends.", gt=0.0
    )
    admin_threads: int = setting(
        4, "Threads that read the database and render the operator's pages.", ge=1
    )
    max_admin_waiting: int = setting(
        64,
        "Maximum number of requests to the operator's pages that wait for a thread. Further "
        "requests get 503.",
        ge=1,
    )
    max_admin_streams: int = setting(
        32,
        "Maximum number of operator's pages with live figures that are open at the same time. "
        "Further pages get 503.",
        ge=1,
    )
    max_admin_streams_per_user: int = setting(
        12,
        "Maximum number of such pages per user in one gateway process. Further pages get 503.",
        ge=1,
    )
