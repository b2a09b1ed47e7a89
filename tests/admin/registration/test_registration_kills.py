"""kill -9 at any moment of a registration: it resumes or fails cleanly, and leaves nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from admin.context.operator_context import OperatorContext
from admin.context.registration_files import RESUMABLE, download_name, is_alive
from admin.operations import models as service_models
from engine.registration.convert import whole_pack
from registry.models import catalog
from tests.engine.hub_server import HubServer, hub_server
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.test_convert import SHAPE

KILLS = 12
REPO = "acme/tiny"
ZYGOTE = Path(__file__).parent / "registration_zygote.py"


class Zygote:
    """The forking process, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pids: dict[str, int] = {}
        assert self.read() == ["ready"]

    def read(self) -> list[str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the zygote died"
        return line.split()

    def start(self, data_dir: Path, verb: str) -> None:
        """Both processes run when this returns."""
        assert self.process.stdin is not None
        self.pids = {}
        job = {"data_dir": str(data_dir), "verb": verb, "name": "m", "source": REPO}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        while len(self.pids) < 2:
            kind, value = self.read()
            if kind != "ended":  # of one that was killed in the very moment
                self.pids[kind] = int(value)

    def finish(self) -> str:
        """How the registration ended."""
        kind, state = self.read()
        assert kind == "ended"
        return state


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = hf_folder(tmp_path / "tiny", LlamaConfig(**SHAPE))
    with hub_server() as server:
        server.add(REPO, folder)
        server.faults.pace_s = 0.02
        yield server


@pytest.fixture
def zygote(hub: HubServer) -> Iterator[Zygote]:
    with subprocess.Popen(
        [sys.executable, str(ZYGOTE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "HF_ENDPOINT": hub.url, "PYTHONPATH": ".", "NO_PROXY": "127.0.0.1"},
    ) as process:
        try:
            yield Zygote(process)
        finally:
            process.kill()


def wait_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_clean(context: OperatorContext) -> str:
    """After a look at the catalog nothing lies about but what a retry goes on with."""
    (model,) = service_models.list_models(context)
    packs = context.data_dir / "packs"
    assert [path.name for path in packs.glob(".tmp-*")] == []
    downloads = [path.name for path in (context.data_dir / "downloads").glob("*")]
    if model.state == "ready":
        assert downloads == []
        assert whole_pack(packs / model.pack) is not None
    else:
        assert model.state == "failed"
        assert model.reason
        assert model.reason_code in RESUMABLE
        assert downloads in ([], [download_name(model)])
    return model.state


def test_killed_at_any_moment(hub: HubServer, context: OperatorContext, zygote: Zygote) -> None:
    zygote.start(context.data_dir, "begin")
    started_s = time.monotonic()
    assert zygote.finish() == "ready"
    whole_s = time.monotonic() - started_s
    check_clean(context)
    size = len(hub.repos[REPO]["model.safetensors"])
    seen: set[str] = set()
    phases: set[str] = set()
    choice = random.Random(0)
    moments = [whole_s * 1.1 * (number + 0.5) / KILLS for number in range(KILLS)]
    choice.shuffle(moments)
    for number, moment in enumerate(moments):
        (model,) = service_models.list_models(context, with_removed=True)
        if model.state == "ready":
            # From nothing again: the pack goes with the model.
            assert service_models.remove_model(context, "m")
            assert list(context.packs_dir.iterdir()) == []
        zygote.start(context.data_dir, "retry" if model.state == "failed" else "begin")
        pids = dict(zygote.pids)
        time.sleep(moment)
        victims = (("registrar",), ("subprocess",), ("registrar", "subprocess"))[number % 3]
        ended = not is_alive(pids["registrar"])
        for victim in victims:
            if is_alive(pids[victim]):
                os.kill(pids[victim], signal.SIGKILL)
        if ended or "registrar" not in victims:
            zygote.finish()
        wait_dead(list(pids.values()))
        with context.reading() as session:
            phases.add(catalog.get_model(session, "m").phase)
        seen.add(check_clean(context))
    assert "failed" in seen, (seen, phases)
    # However it was left, it ends well when it is let be.
    (model,) = service_models.list_models(context)
    if model.state == "failed":
        zygote.start(context.data_dir, "retry")
        assert zygote.finish() == "ready"
    assert check_clean(context) == "ready"
    assert hub.sent["model.safetensors"] < size * KILLS
    service_models.sweep_packs(context.data_dir, context.engine)
    (model,) = service_models.list_models(context)
    assert [path.name for path in context.packs_dir.iterdir()] == [model.pack]
