"""The real worker process: two tiny models that do not fit together, over its real socket."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig, WorkerConfig
from engine.errors import IntegrityError
from engine.protocol import (
    Abort,
    AckUsage,
    LoadModel,
    ModelSpec,
    Refused,
    SamplingParams,
    SetCatalog,
    Submit,
    UnloadModel,
    Welcome,
    WorkerStatus,
)
from engine.registration.convert import inspect, write_pack
from engine.worker import main as worker
from engine.worker.main import EXIT_FAILED, EXIT_ORPHANED
from tests.engine.worker_rig import Gateway

PATIENCE_S = 60.0
VOCAB = 96
PROMPTS = [[5, 17, 3, 44, 9], [61, 2, 2, 80], [7] * 40, [33, 34, 35, 36, 37, 38, 39]]
NUM_TOKENS = 12
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class TinyModel:
    """A random llama: its pack, and what transformers generates from it for each prompt."""

    name: str
    pack_dir: Path
    weight_bytes: int
    expected: list[list[int]]


def make_model(name: str, seed: int, directory: Path) -> TinyModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    folder = directory / name
    model.save_pretrained(folder)
    Tokenizer(WordLevel({"a": 0}, "a")).save(str(folder / "tokenizer.json"))
    pack_dir, index = write_pack(inspect(folder), directory / "packs", "float32", lambda *_: None)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
        expected.append(made[0, len(prompt) :].tolist())
    return TinyModel(name, pack_dir, index.total_bytes, expected)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    directory = tmp_path_factory.mktemp("models")
    torch.set_num_threads(1)
    return [make_model("one", 1, directory), make_model("two", 2, directory)]


@dataclass
class Running:
    """A worker process and one gateway."""

    process: subprocess.Popen[str]
    config: WorkerConfig
    gateway: Gateway
    context: zmq.Context[zmq.Socket[bytes]]
    log: Path
    models: list[TinyModel] = field(default_factory=list)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            self.gateway.socket.poll(20)
            self.gateway.pump()

    def state(self, model_id: str) -> str:
        return next((m.state for m in self.gateway.status.models if m.model_id == model_id), "")

    def ask(self, request_id: str, model: str, prompt: list[int], max_tokens: int) -> None:
        greedy = SamplingParams(temperature=0.0)
        self.gateway.send(Submit(request_id, 1, "t", model, prompt, max_tokens, greedy, []))

    def greedy(self, model: TinyModel, tag: str) -> None:
        """All prompts at once; token for token what transformers generates."""
        names = [f"{tag}-{model.name}-{number}" for number in range(len(PROMPTS))]
        for name, prompt in zip(names, PROMPTS, strict=True):
            self.ask(name, model.name, prompt, NUM_TOKENS)
        self.until(lambda: all(self.gateway.finishes(name) for name in names))
        assert [self.gateway.tokens(name) for name in names] == model.expected
        self.gateway.send(AckUsage([(name, 1) for name in names]))


def config_of(directory: Path, models: list[TinyModel], parent_pid: int) -> WorkerConfig:
    page_bytes = 4096
    room = models[0].weight_bytes + models[0].weight_bytes // 2  # one model and KV, not two
    engine = EngineConfig(
        arena_bytes=room - room % page_bytes,
        page_bytes=page_bytes,
        shm_dir=str(directory),
        shm_prefix="test",
        num_threads=1,
        max_batch_tokens=24,
        max_num_seqs=24,
        steps_ahead=1,  # steps in a thread of their own; other tests have the default
    )
    return WorkerConfig(
        worker_id="real",
        endpoint=f"ipc://{directory}/w.sock",
        engine=engine,
        parent_pid=parent_pid,
        integrity_interval_s=0.05,
    )


def start(directory: Path, models: list[TinyModel], parent_pid: int) -> Running:
    config = config_of(directory, models, parent_pid)
    log = directory / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.worker.main", "--config", msgspec.json.encode(config)],
            stderr=stream,
            text=True,
            env=ENVIRONMENT,
        )
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(config.endpoint)
    return Running(process, config, Gateway(socket, "g"), context, log, models)


@contextmanager
def serving(directory: Path, models: list[TinyModel]) -> Iterator[Running]:
    """A worker with all of them in its catalog."""
    made = start(directory, models, os.getpid())
    try:
        made.gateway.hello()
        made.until(lambda: bool(made.gateway.all(WorkerStatus)))
        made.gateway.send(SetCatalog([ModelSpec(m.name, str(m.pack_dir)) for m in models]))
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.gateway.close()
        made.context.destroy(linger=0)


@pytest.fixture(scope="module")
def running(models: list[TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("w"), models) as made:
        yield made


def test_each_model_speaks_as_in_transformers_however_often_swapped(running: Running) -> None:
    assert isinstance(running.gateway.received[0], Welcome)
    one, two = running.models
    for tag in "ab":
        for model, other in ((one, two), (two, one)):
            running.gateway.send(LoadModel(model.name))
            running.until(lambda name=model.name: running.state(name) == "resident")  # type: ignore[misc]
            assert running.state(other.name) != "resident"
            running.greedy(model, tag)
    kinds = [s.kind for m in running.gateway.received if hasattr(m, "swaps") for s in m.swaps]
    assert kinds.count("load") == 4
    assert kinds.count("evict") == 3


def test_a_request_that_is_out_of_time_ends(running: Running) -> None:
    two = running.models[1]
    greedy = SamplingParams(temperature=0.0)
    late = Submit("late", 1, "t", two.name, PROMPTS[0], NUM_TOKENS, greedy, [], timeout_s=-1.0)
    running.gateway.send(late)
    running.until(lambda: bool(running.gateway.finishes("late")))
    (finish,) = running.gateway.finishes("late")
    assert (finish.reason, finish.usage.generated_tokens) == ("timeout", 0)
    running.gateway.send(AckUsage([("late", 1)]))


def test_bad_requests_and_garbage_are_refused_and_harm_nobody(running: Running) -> None:
    two = running.models[1]
    running.gateway.socket.send(b"\xff" * 100)
    running.ask("long", two.name, [1] * 250, 10)
    running.ask("alien", two.name, [VOCAB], 1)
    running.ask("cold", running.models[0].name, [1], 1)
    running.ask("nowhere", "three", [1], 1)
    running.until(lambda: len(running.gateway.all(Refused)) == 4)
    told = {refused.request_id: refused.code for refused in running.gateway.all(Refused)}
    assert told == {
        "long": "context_length_exceeded",
        "alien": "context_length_exceeded",
        "cold": "not_resident",
        "nowhere": "unknown_model",
    }
    running.greedy(two, "after")


def test_abort_and_usage(running: Running) -> None:
    two = running.models[1]
    running.ask("stopped", two.name, PROMPTS[0], 200)
    running.until(lambda: len(running.gateway.tokens("stopped")) > 3)
    running.gateway.send(Abort("stopped", 1))
    running.until(lambda: bool(running.gateway.finishes("stopped")))
    (finish,) = running.gateway.finishes("stopped")
    assert finish.reason == "abort"
    assert finish.usage.prompt_tokens == len(PROMPTS[0])
    assert finish.usage.generated_tokens == len(running.gateway.tokens("stopped"))
    assert finish.usage.service_s > 0
    running.gateway.send(AckUsage([("stopped", 1)]))
    running.until(lambda: running.gateway.status.counters["usage_outbox_size"] == 0)


def test_every_page_is_free_at_the_end_and_sigterm_drains(running: Running) -> None:
    running.gateway.send(UnloadModel(running.models[1].name))
    total = running.gateway.status.num_pages
    running.until(lambda: running.gateway.status.pages == {"free": total})
    time.sleep(0.2)  # the idle worker runs check_integrity meanwhile
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    assert lines[-1]["message"] == "the worker has stopped"
    assert {line["level"] for line in lines} <= {"info", "warning"}


def test_a_worker_without_its_parent_ends(
    models: list[TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process. That the parent's death is noticed:
    tests/engine/worker/test_main.py.
    """
    watched: list[int] = []

    def gone(parent_pid: int, stop: Callable[[], None]) -> None:
        watched.append(parent_pid)
        stop()

    monkeypatch.setattr(worker, "end_with_parent", gone)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda number: None)
    monkeypatch.setattr(os, "umask", lambda mask: 0)
    config = config_of(tmp_path, models, os.getpid())
    assert worker.serve(config) == EXIT_ORPHANED
    assert watched == [os.getpid()]


def test_main_is_the_boundary(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = WorkerConfig(
        worker_id="w",
        endpoint=f"ipc://{tmp_path}/w",
        engine=EngineConfig(arena_bytes=1 << 20, shm_prefix="t"),
    )

    def broken(config: WorkerConfig) -> int:
        raise IntegrityError("a page too many")

    monkeypatch.setattr(worker, "serve", broken)
    monkeypatch.setattr(worker, "set_up_logging", lambda worker_id: None)
    assert worker.main(["--config", msgspec.json.encode(config).decode()]) == EXIT_FAILED
    with pytest.raises(SystemExit) as exit_:
        worker.main(["--config", '{"worker_id": "w"}'])
    assert exit_.value.code == 2
    for given, code in ((msgspec.json.encode(config).decode() + "\n", EXIT_FAILED), ("", 3)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        assert worker.main(["--config", "-"]) == code
    assert "endpoint" in capfd.readouterr().err
