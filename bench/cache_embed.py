"""How long a question's vector takes: the embedder's worker as a server runs it, and its client.

    python -m bench.cache_embed --source FOLDER

Registers the embedding model of that folder in a data folder of its own, starts the worker
(server/embedder_home.py) and asks for vectors of short questions, one at a time, through the
tokenizer and the socket, as a request does. Prints milliseconds.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

from gateway.cache.embedder import HostedEmbedder
from gateway.directory import Directory
from gateway.prepare.codecs import Codecs, PreparePool
from gateway.server import embedder_home
from gateway.server.embedder_home import EmbedderHome
from gateway.server.worker_process import WORKER_COMMAND
from gateway.service.models import hosted_models
from gateway.settings import Settings
from registry import catalog
from registry.session import make_engine, reading

NAME = "embedder"
QUESTIONS = [
    "How do I reset my password?",
    "When are you open?",
    "What is the refund process?",
    "Flights from Paris to New York on 3 May",
    "Can I change the delivery address of an order that has been sent?",
]


async def measure(settings: Settings, num_asks: int) -> list[float]:
    """Milliseconds of each, in the order they were asked."""
    directory = Directory()
    engine = make_engine(settings.registry_url)
    with reading(engine) as session:
        models = hosted_models(session, settings.data_path)
        weights = {m.name: m.weight_bytes for m in catalog.ready_models(session)}
    engine.dispose()
    directory.replace(1, [], models)
    home = EmbedderHome(settings, WORKER_COMMAND, lambda reason: None)
    home.set_weights(weights)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    worker = embedder_home.connection(settings, context, "bench")
    assert worker is not None
    keeping = asyncio.create_task(home.run())
    codecs = Codecs(PreparePool(1, 8, settings.prepare_inline_s), 2)
    embedder = HostedEmbedder(NAME, directory, codecs, worker, 10.0)
    taken = []
    try:
        worker.set_models(models)
        worker.start()
        while await embedder.embed(QUESTIONS[:1]) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for number in range(num_asks + len(QUESTIONS)):
            begun_s = time.perf_counter()
            vectors = await embedder.embed([QUESTIONS[number % len(QUESTIONS)]])
            assert vectors is not None
            taken.append(1000 * (time.perf_counter() - begun_s))
    finally:
        worker.close()
        await home.process.stop(5.0)
        await keeping
        codecs.pool.close()
        context.destroy(linger=0)
    return taken[len(QUESTIONS) :]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="folder of an embedding model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--asks", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = ["--data-dir", folder]
        add = ["models", "add", NAME, "--source", str(options.source)]
        for command in (["db", "upgrade"], add):
            line = [sys.executable, "-m", "gateway", *command, *data]
            subprocess.run(line, check=True, stdout=sys.stderr)
        settings = Settings(
            data_dir=folder, cache_embedder=NAME, cache_embed_threads=options.threads
        )
        taken = sorted(asyncio.run(measure(settings, options.asks)))
    cuts = statistics.quantiles(taken, n=100)
    print(
        json.dumps(
            {
                "threads": options.threads,
                "asks": len(taken),
                "p50_ms": round(cuts[49], 2),
                "p90_ms": round(cuts[89], 2),
                "p99_ms": round(cuts[98], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
