"""Settings of what is done per request around the queue: the HTTP edge, preparing, the cache.

A part of settings.Settings, which says how they are read; no other object has these alone.
"""

import ipaddress
from typing import Annotated

import msgspec

from gateway.settings_kinds import MIB, Count, CountOrZero, Seconds, doc
from gateway.settings_oidc import OidcSettings


def _check_proxy(text: str) -> None:
    """Raises ValueError: a name would be compared with addresses, and never be one."""
    if text == "*":
        return
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"trusted_proxies: {error}") from error


class HttpSettings(OidcSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    trusted_proxies: Annotated[
        str,
        doc(
            "Addresses and networks of proxies in front, with commas: X-Forwarded-For of these is "
            "believed. `*`: anybody's. Empty: nobody's."
        ),
    ] = ""
    max_body_bytes: Annotated[int, Count, doc("Largest request body; beyond it 413.")] = 8 * MIB
    max_head_bytes: Annotated[
        int, Count, doc("Largest head of a request: its address and headers; beyond it 431.")
    ] = 65_536
    receive_timeout_s: Annotated[
        float,
        Seconds,
        doc(
            "How long a request's head may take to come, beyond it the connection is closed; "
            "and its body, beyond it 408."
        ),
    ] = 60.0
    tls_cert_file: Annotated[
        str,
        doc("Certificate chain, PEM: with it the server speaks TLS. Read again when it changes."),
    ] = ""
    tls_key_file: Annotated[
        str, doc("Its private key, PEM; empty: it is in the certificate's file.")
    ] = ""
    cors_origins: Annotated[
        str,
        doc(
            "Origins whose web pages may call the API, with commas, such as "
            "`https://app.example.com`. `*`: any. Empty: none."
        ),
    ] = ""
    keep_alive_timeout_s: Annotated[
        float,
        Seconds,
        doc("How long a connection may be idle between two requests; beyond it it is closed."),
    ] = 30.0
    max_connections: Annotated[
        int, CountOrZero, doc("Connections open at one time; beyond it 503. 0: no bound.")
    ] = 20_000
    max_connections_per_address: Annotated[
        int,
        CountOrZero,
        doc(
            "Of these from one address that is no trusted proxy, or one /64 of IPv6; beyond it "
            "429. 0: no bound."
        ),
    ] = 2048
    connection_rate_per_address: Annotated[
        float,
        CountOrZero,
        doc(
            "New connections a second of such an address that are served, after a second's worth "
            "at once; beyond it they wait for their turn. 0: no bound."
        ),
    ] = 200.0
    default_max_tokens: Annotated[
        int, Count, doc("Tokens generated at most where a request names no bound.")
    ] = 256
    max_encode_inputs: Annotated[
        int,
        Count,
        doc("Inputs of one request to embed or classify, or documents to rerank, at most."),
    ] = 2048
    max_encode_tokens: Annotated[
        int, Count, doc("Tokens of all inputs of such a request together at most.")
    ] = 300_000
    max_encode_answer_bytes: Annotated[
        int,
        Count,
        doc(
            "Answers to one tenant's such requests, from the first row until the client has read "
            "all of it; beyond it 429 queue_full. One request always may."
        ),
    ] = 256 * MIB
    encode_piece_tokens: Annotated[
        int,
        msgspec.Meta(ge=1, le=262_144),
        doc(
            "Tokens of such a request that go to a worker at one time: whole inputs, two pieces "
            "queued at once, between which other requests get their turn."
        ),
    ] = 4096
    max_choices: Annotated[
        int, Count, doc("Answers that one request may ask for (`n`) at most.")
    ] = 16
    max_stream_buffer_tokens: Annotated[
        int,
        Count,
        doc("Tokens waiting for a client that does not read; beyond it the request is aborted."),
    ] = 2048
    stream_write_timeout_s: Annotated[
        float,
        Seconds,
        doc("How long one event may take to send; beyond it the client is cut off."),
    ] = 30.0
    stream_heartbeat_s: Annotated[
        float,
        CountOrZero,
        doc(
            "A stream that has said nothing for so long gets a comment; one that waits so long for "
            "its first token begins with status 200, and what fails later is an error event. "
            "0: never."
        ),
    ] = 15.0
    prepare_threads: Annotated[
        int, Count, doc("Threads that render chat templates and tokenize.")
    ] = 2
    prepare_inline_s: Annotated[
        float,
        CountOrZero,
        doc(
            "Prompts that should take no longer are prepared without a thread: waking one takes "
            "longer. By the time that the model's earlier ones took by their length; 0: none."
        ),
    ] = 0.001
    max_prepare_pending: Annotated[
        int, Count, doc("Requests being prepared or waiting for it; beyond it 429 queue_full.")
    ] = 256
    max_tokenizers: Annotated[
        int, Count, doc("Models whose tokenizer and template are kept in memory.")
    ] = 32
    admin_session_s: Annotated[
        float,
        Seconds,
        doc("How long a sign-in to the operator's pages holds; then the password is asked for."),
    ] = 43_200.0
    admin_idle_s: Annotated[
        float, Seconds, doc("How long such a session may rest unused; beyond it it ends.")
    ] = 3600.0
    admin_threads: Annotated[
        int, Count, doc("Threads that read the database and render the operator's pages.")
    ] = 4
    max_admin_waiting: Annotated[
        int, Count, doc("Requests for the operator's pages waiting for a thread; beyond it 503.")
    ] = 64
    max_admin_streams: Annotated[
        int, Count, doc("Operator's pages that show live figures at one time; beyond it 503.")
    ] = 32
    max_admin_streams_per_user: Annotated[
        int, Count, doc("Of these, how many one user may have open in a process; beyond it 503.")
    ] = 12

    def check_http(self) -> None:
        """Raises ValueError where fields contradict one another, or name what is not."""
        for proxy in filter(None, (p.strip() for p in self.trusted_proxies.split(","))):
            _check_proxy(proxy)
        if self.tls_key_file and not self.tls_cert_file:
            raise ValueError("tls_key_file needs tls_cert_file: name the certificate too")
