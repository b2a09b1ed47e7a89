"""Workers killed, stopped, drained and restarted at random under load: what clients see of it.

    python -m bench.worker_drill --workers 2 --requests 2000 [--events 100] [--output FILE]

A real server with so many one-thread workers on this machine's CPU, and twelve models (the demo's
three, each with three siblings whose weights differ a little) of which each worker has memory for
half. Clients stream greedy answers all the time. Every few seconds something happens to a worker:

    kill      SIGKILL
    hang      SIGSTOP: it is lost after the heartbeat's time-out, and killed after another one
    drain     drained, and resumed when the next thing happens
    restart   drained and restarted

After each of these, and after each resume, the books of dispatcher, gateway and workers are checked
(`polyhost workers check`).

Every answer is compared with what transformers makes of the same prompt in float32, alone. Where
texts differ, transformers' own logits decide: a step whose two best are within TIE is a tie, and no
fault. Every answer must have one posting, with the tokens that the client was told of. Exit status
1: something was lost, wrong, or billed twice; some books did not agree; or fewer than 99 % of the
streams that lost their worker came to their end.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file

from admin.context.operator_context import open_context
from admin.operations.models import begin_registration
from admin.registration import registrar
from bench import client, command
from bench.client import Answer
from bench.processes import ServerFailed
from bench.servers import Polyhost, Server, total
from bench.stats import spread
from gateway.ipc.control_socket import ask
from gateway.settings.settings import Settings
from registry.schema import upgrade

DEMO = Path(__file__).parents[1] / "gateway" / "demo_models"
SIBLINGS = 4
NOISE = 0.03
PROMPTS_PER_MODEL = 6
MAX_TOKENS = 80
STOPS = (1, 5)
"""Tokens that end an answer of these models; none may, so that streams are long."""
STOP_BIAS = -100.0
TIE = 1e-4
ROOM = 1.2
"""Of the files' size, which is of bfloat16: weights in float32 take twice that, KV a little."""
HEARTBEAT_S = 3.0
RESUMED_SHARE = 0.99
Event = Literal["kill", "hang", "drain", "restart"]
EVENTS: Sequence[Event] = ("kill", "hang", "drain", "restart")


@dataclass(frozen=True, slots=True)
class Reference:
    """Transformers' answer. `gaps`: between the two best logits, a step each."""

    text: str
    gaps: tuple[float, ...]
    texts: tuple[str, ...]
    """After each step."""


def write_models(folder: Path) -> dict[str, Path]:
    """The twelve, by name."""
    found = {}
    for source in sorted(path for path in DEMO.iterdir() if path.is_dir()):
        for sibling in range(SIBLINGS):
            name = f"{source.name}-{sibling}"
            found[name] = folder / name
            if found[name].exists():
                continue
            shutil.copytree(source, found[name])
            weights = load_file(found[name] / "model.safetensors")
            noise = torch.Generator().manual_seed(sibling)
            for key, tensor in weights.items():
                if sibling and tensor.is_floating_point() and tensor.dim() > 1:
                    drawn = (
                        torch.randn(tensor.shape, generator=noise) * NOISE * tensor.float().std()
                    )
                    weights[key] = (tensor.float() + drawn).to(tensor.dtype)
            save_file(weights, found[name] / "model.safetensors", {"format": "pt"})
    return found


def messages(number: int) -> list[dict[str, str]]:
    """A prompt."""
    return [{"role": "user", "content": f"Tell me about number {number}, and what it did next."}]


def register(data_dir: Path, models: Mapping[str, Path]) -> None:
    """All in one process, in float32: a process each takes longer than the drill."""
    settings = Settings(data_dir=str(data_dir))
    settings.data_path.mkdir(parents=True, exist_ok=True)
    upgrade(settings.registry_url)
    with open_context(settings, "drill") as context:
        begun = [
            begin_registration(context, name, str(source), dtype="float32")
            for name, source in models.items()
        ]
        for model in registrar.run(context, begun):
            if model.state != "ready":
                raise ServerFailed(f"{model.name}: {model.reason}")


@torch.inference_mode()
def reference(model: Any, tokenizer: Any, number: int) -> Reference:
    """Greedy, without an end."""
    ids = tokenizer.apply_chat_template(messages(number), add_generation_prompt=True)
    ids = list(ids["input_ids"] if hasattr(ids, "keys") else ids)
    cache, step, made, gaps, texts = None, torch.tensor([ids]), [], [], []
    for _ in range(MAX_TOKENS):
        out = model(step, past_key_values=cache, use_cache=True)
        logits = out.logits[0, -1].float()
        logits[list(STOPS)] += STOP_BIAS
        best = logits.topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        made.append(int(best.indices[0]))
        texts.append(tokenizer.decode(made, skip_special_tokens=True))
        cache, step = out.past_key_values, torch.tensor([[made[-1]]])
    return Reference(texts[-1], tuple(gaps), tuple(texts))


def references(folders: dict[str, Path]) -> dict[tuple[str, int], Reference]:
    """Of every model and prompt."""
    found = {}
    for name, folder in folders.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for number in range(PROMPTS_PER_MODEL):
            found[name, number] = reference(model.eval(), tokenizer, number)
    return found


def verdict(text: str, expected: Reference) -> Literal["same", "tie", "wrong"]:
    """`tie`: it parts from the reference no earlier than at a step that was one."""
    if text == expected.text:
        return "same"
    agreed = 0
    while agreed < len(expected.texts) and text.startswith(expected.texts[agreed].rstrip("\ufffd")):
        agreed += 1
    return "tie" if any(gap < TIE for gap in expected.gaps[: agreed + 1]) else "wrong"


@dataclass(slots=True)
class Drill:
    """One server under load, and what happens to it."""

    server: Server
    polyhost: Polyhost
    num_workers: int
    rng: random.Random
    num_events: Counter[str]
    checks: Counter[str] = field(default_factory=Counter)
    """By state (integrity_check.py), of each part and worker."""
    findings: list[str] = field(default_factory=list)

    def process_of(self, worker: str) -> int:
        """As the log says; 0: none yet."""
        marker = f"process started name={worker} pid="
        told = [line for line in self.server.process.read_log().splitlines() if marker in line]
        return int(told[-1].partition(marker)[2].partition('"')[0]) if told else 0

    async def order(self, action: str, worker: str) -> None:
        """By the command line."""
        await asyncio.to_thread(self.polyhost.run, "workers", action, worker)

    async def check(self) -> None:
        """Dispatcher, gateway and all workers that are there."""
        answer = await asyncio.to_thread(ask, self.server.data_dir, ask="check")
        for name, one in answer["checks"].items():
            self.checks[one["state"]] += 1
            if one["state"] == "broken":
                self.findings.append(f"{name}: {one['text']}")

    async def violence(self, pause_s: float, most: int) -> None:
        """One thing after another, until it is cancelled or `most` have happened."""
        drained = ""
        while sum(self.num_events.values()) < most:
            await asyncio.sleep(pause_s * self.rng.uniform(0.5, 1.5))
            if drained:
                await self.order("resume", drained)
                await self.check()
                drained = ""
            event = self.rng.choice(EVENTS)
            worker = f"worker-{self.rng.randrange(self.num_workers)}"
            self.num_events[event] += 1
            if event in ("kill", "hang"):
                number = signal.SIGKILL if event == "kill" else signal.SIGSTOP
                try:
                    os.kill(self.process_of(worker), number)
                except ProcessLookupError:
                    self.num_events["nobody there"] += 1
            else:
                await self.order(event, worker)
                drained = worker if event == "drain" else ""
            await self.check()
        if drained:
            await self.order("resume", drained)

    async def clients(
        self, wanted: Sequence[tuple[str, int]], at_once: int
    ) -> list[tuple[tuple[str, int], Answer]]:
        """So many at a time, until all have been asked."""
        left, done = iter(wanted), []

        async def one(session: Any) -> None:
            for model, number in left:
                answer = Answer()
                body = {
                    "model": model,
                    "messages": messages(number),
                    "max_tokens": MAX_TOKENS,
                    "temperature": 0,
                    "logit_bias": {str(token_id): STOP_BIAS for token_id in STOPS},
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                key = self.server.api_key
                await client.ask(session, self.server.url, key, body, answer, timeout_s=300)
                done.append(((model, number), answer))

        async with client.new_session(force_close=True) as session:
            await asyncio.gather(*(one(session) for _ in range(at_once)))
        return done


async def drill(it: Drill, args: argparse.Namespace, keys: Sequence[tuple[str, int]]) -> Any:
    """Load and violence together."""
    wanted = [it.rng.choice(keys) for _ in range(args.requests)]
    violence = asyncio.create_task(it.violence(args.pause, args.events))
    try:
        return await it.clients(wanted, args.clients)
    finally:
        violence.cancel()
        with suppress(asyncio.CancelledError):
            await violence


def judge(
    it: Drill, done: Sequence[tuple[tuple[str, int], Answer]], expected: Any
) -> dict[str, Any]:
    """What came of it."""
    it.server.wait_until(it.server.has_posted)
    rows = it.polyhost.usage()
    posted = Counter(row["request_id"] for row in rows)
    told = {row["request_id"]: (row["prompt_tokens"], row["completion_tokens"]) for row in rows}
    whole = [(key, one) for key, one in done if one.end == "done"]
    verdicts = Counter(verdict(one.text, expected[key]) for key, one in whole)
    series = it.server.metrics()
    num_resumed = int(total(series, "request_resumes_total"))
    failed = [one for _, one in done if one.end != "done"]
    gaps = [max(one.gaps_s, default=0.0) for _, one in whole]
    firsts = [one.first_s - one.began_s for _, one in whole if one.first_s is not None]
    return {
        "requests": len(done),
        "done": len(whole),
        "texts": dict(verdicts),
        "failed": dict(Counter(f"{one.end} {one.code}" for one in failed)),
        "failed_after_tokens": sum(one.chunks > 0 for one in failed),
        "resumed": num_resumed,
        "retried": int(total(series, "request_retries_total")),
        "posted_twice": sum(count > 1 for count in posted.values()),
        "not_posted": sum(one.request_id not in posted for _, one in whole),
        "usage_differs": sum(told.get(one.request_id) != one.told for _, one in whole),
        "worker_restarts": int(total(series, "worker_restarts_total")),
        "events": dict(it.num_events),
        "checks": dict(it.checks),
        "findings": it.findings,
        "integrity_errors_logged": it.server.process.read_log().count("IntegrityError"),
        "longest_gap_s": spread(gaps),
        "first_token_s": spread(firsts),
    }


def is_good(found: dict[str, Any]) -> bool:
    """See the module."""
    broken = found["resumed"] + found["failed_after_tokens"]
    share = found["resumed"] / broken if broken else 1.0
    lost = found["requests"] - found["done"] - found["failed_after_tokens"]
    doubled = found["posted_twice"] + found["not_posted"] + found["usage_differs"]
    broken_books = found["findings"] or found["integrity_errors_logged"]
    if broken_books or not found["checks"].get("ok"):
        return False
    return not (lost or doubled or found["texts"].get("wrong", 0)) and share >= RESUMED_SHARE


def main() -> int:
    """Prints and keeps what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.worker_drill", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--events", type=int, default=10**9, help="at most so many")
    parser.add_argument("--pause", type=float, default=8.0, help="seconds between two, on average")
    parser.add_argument("--seed", type=int, default=1)
    command.add_options(parser)
    args = parser.parse_args()
    with command.working_in(args.work_dir) as folder:
        models = write_models(folder / "models")
        expected = references(models)
        size = sum(f.stat().st_size for path in models.values() for f in path.glob("*.safetensors"))
        settings = {
            "num_workers": args.workers,
            "num_threads": 1,
            "device_budget_bytes": int(size * ROOM),
            "host_tier_bytes": 2 * size,
            "worker_heartbeat_timeout_s": HEARTBEAT_S,
            "worker_drain_timeout_s": 2.0,
            "queue_timeout_s": 300.0,
            **command.settings_of(args),
        }
        polyhost = Polyhost(folder / "data", settings)
        register(folder / "data", models)
        with (server := polyhost.serve(polyhost.new_key())).process:
            it = Drill(server, polyhost, args.workers, random.Random(args.seed), Counter())
            began_s = time.monotonic()
            done = asyncio.run(drill(it, args, list(expected)))
            found = {
                "workers": args.workers,
                "seed": args.seed,
                "wall_s": time.monotonic() - began_s,
                **judge(it, done, expected),
            }
    print(json.dumps(found, indent=1))
    command.keep(found, args.output, "worker-drill")
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
