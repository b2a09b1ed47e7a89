"""Between the processes of a server with several gateways and the one that started them: messages.

    child -> parent    Here, Told, Scrape, Weights
    parent -> child    Collect, Scraped, WorkerEnded

The connection's end tells a child that its parent is gone, and it stops.
"""

from typing import TypeAlias

import msgspec

from gateway.metrics.metrics_merge import Family


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base: tagged arrays on the wire."""


class Here(_Message, frozen=True):
    """First message: who speaks."""

    name: str


class Told(_Message, frozen=True):
    """What the process counts, and whether it could serve a request (or grant one) now. Answer to
    Collect, and a heartbeat."""

    call: int
    families: list[Family]
    ready: bool


class Scrape(_Message, frozen=True):
    """Somebody asks for /metrics; answered by Scraped."""

    call: int


class Weights(_Message, frozen=True):
    """Bytes of each ready model's weights, from the process that reads the registry."""

    weights: dict[str, int]


class Collect(_Message, frozen=True):
    """Answer with Told."""

    call: int


class Scraped(_Message, frozen=True):
    """Prometheus' text, of all processes."""

    call: int
    body: bytes


class WorkerEnded(_Message, frozen=True):
    """A worker process is gone: nobody has to wait for its silence."""

    worker_id: str
    reason: str


ToParent: TypeAlias = Here | Told | Scrape | Weights
ToChild: TypeAlias = Collect | Scraped | WorkerEnded

to_parent: "msgspec.msgpack.Decoder[list[ToParent]]" = msgspec.msgpack.Decoder(list[ToParent])
to_child: "msgspec.msgpack.Decoder[list[ToChild]]" = msgspec.msgpack.Decoder(list[ToChild])
