"""Some traffic for a server of the data folder, so that its live pages have something to show."""

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from bench.lived_in.world import TENANTS, KeyPlan

PAUSE_S = 0.6
NUM_ASKERS = 4
TIMEOUT_S = 60.0


class Askers:
    """Threads that ask until the block ends; what the server refuses is a part of it."""

    def __init__(self, url: str, manifest: Path, seed: int = 0) -> None:
        self._url = url
        self._secrets: Mapping[str, str] = json.loads(manifest.read_text())["keys"]
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_ASKERS)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _run(self) -> None:
        plans = [(tenant.name, plan) for tenant in TENANTS for plan in tenant.keys]
        while not self._over.wait(PAUSE_S):
            tenant, plan = self._rng.choices(plans, [each.traffic for _, each in plans])[0]
            secret = self._secrets.get(f"{tenant}/{plan.name}", "")
            self._ask(plan, secret)

    def _ask(self, plan: KeyPlan, secret: str) -> None:
        model = self._rng.choice(plan.models)
        words = " ".join(self._rng.choice(("moon", "cat", "the", "far")) for _ in range(12))
        body: dict[str, object] = {"model": model}
        path = "embeddings" if model == "minilm-embed" else "chat/completions"
        if path == "embeddings":
            body["input"] = words
        else:
            content = "What is the capital of France?" if plan.hits else words
            body["messages"] = [{"role": "user", "content": content}]
            body["max_tokens"] = self._rng.randint(20, 120)
        request = urllib.request.Request(f"{self._url}/v1/{path}", json.dumps(body).encode())
        request.add_header("authorization", f"Bearer {secret}")
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            return
