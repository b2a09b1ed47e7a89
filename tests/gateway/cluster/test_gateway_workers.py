"""What a gateway knows of workers: processes, offers, and where a model is."""

import pytest

from gateway.cluster.gateway_workers import GatewayWorkers
from tests.gateway.scripted_worker import ScriptedWorker, hosted


class Heard:
    """A listener that puts it into the table."""

    def __init__(self, workers: GatewayWorkers) -> None:
        self.workers = workers
        self.now_s = 0.0

    def on_connected(self, worker_id: str, epoch: str) -> None:
        self.workers.connect(worker_id, epoch)

    def on_status(self, worker_id: str, status: object) -> None:
        self.workers.update(worker_id, status, self.now_s)  # type: ignore[arg-type]

    def on_lost(self, worker_id: str, *_: object) -> None:
        self.workers.lose(worker_id)

    def on_deltas(self, *_: object) -> None: ...

    def on_refused(self, *_: object) -> None: ...


def fleet(**states: dict[str, str]) -> tuple[GatewayWorkers, Heard, list[ScriptedWorker]]:
    workers = GatewayWorkers()
    heard = Heard(workers)
    made = [ScriptedWorker(name, states=of) for name, of in states.items()]  # type: ignore[arg-type]
    for worker in made:
        workers.add(worker, heard)
        worker.connect()
    return workers, heard, made


def test_a_process_is_known_by_its_epoch_until_it_is_lost() -> None:
    workers, _, (one,) = fleet(one={"m": "resident"})
    before = one.epoch
    assert workers.is_heard
    assert workers.has("one", before)
    one.die()
    assert not workers.has("one", before)
    assert not workers.is_heard
    one.connect(status=False)
    assert workers.has("one", one.epoch)
    assert not workers.has("one", before)
    assert not workers.is_heard, "it has said nothing yet"


def test_offers_expire_with_the_status_that_made_them() -> None:
    workers, _, _ = fleet(one={"m": "resident"}, two={"m": "cold"})
    assert workers.offering("m", 1.9) == ["one"]
    assert workers.offering("m", 2.1) == []


def test_a_model_is_where_it_is_nearest_to_serving() -> None:
    workers, _, (one, two) = fleet(one={"m": "warm"}, two={"m": "loading"})
    assert workers.residency("m") == "loading"
    assert workers.load_s(hosted("m")) == pytest.approx(0.5)
    two.die()
    assert workers.residency("m") == "warm"
    one.states["m"] = "resident"
    one.status()
    assert (workers.residency("m"), workers.load_s(hosted("m"))) == ("resident", 0.0)
    assert (workers.residency("x"), workers.load_s(hosted("x"))) == ("cold", None)


def test_a_model_has_failed_where_it_failed_on_every_worker() -> None:
    workers, _, (one, two) = fleet(one={"m": "failed"}, two={"m": "cold"})
    one.reasons["m"] = two.reasons["m"] = "no such file"
    one.status()
    assert workers.failure(hosted("m")) is None
    two.states["m"] = "failed"
    two.status()
    assert workers.failure(hosted("m")) == "no such file"
    assert workers.load_s(hosted("m")) is None
