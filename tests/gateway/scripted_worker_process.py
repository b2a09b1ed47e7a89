"""A worker process for the supervisor's tests: speaks the protocol, has no engine, starts at once.

`python -m tests.gateway.scripted_worker_process --config JSON`. Offers no model; ends at SIGTERM.
"""

import os
import signal
import sys

import msgspec
import zmq

from engine.config import WorkerConfig
from engine.protocol import PROTOCOL_VERSION, Hello, Welcome, WorkerStatus, decode_to_worker, encode


def main() -> None:
    """Answer Hello, send heartbeats, until told to end. A bad configuration is an exit status."""
    config = msgspec.json.decode(sys.argv[-1], type=WorkerConfig)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    epoch = str(os.getpid())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers: set[bytes] = set()
    with context.socket(zmq.ROUTER) as router:
        router.bind(config.endpoint)
        while True:
            while router.poll(20):
                identity, frame = router.recv_multipart()
                if isinstance(decode_to_worker(frame), Hello):
                    peers.add(identity)
                    welcome = Welcome(PROTOCOL_VERSION, config.worker_id, epoch, "none")
                    router.send_multipart([identity, encode(welcome)])
            status = WorkerStatus(
                epoch,
                config.worker_id,
                free_requests=1,
                free_kv_bytes=0,
                lease_ttl_s=config.lease_ttl_s,
                page_bytes=config.engine.resolved_page_bytes,
                num_pages=config.engine.num_pages,
                pages={},
                models=[],
                leases=[],
                swaps=[],
                counters={},
            )
            for identity in peers:
                router.send_multipart([identity, encode(status)])


if __name__ == "__main__":
    main()
