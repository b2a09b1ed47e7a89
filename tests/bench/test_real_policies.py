"""The real server's benches on popularity and floods: logs, figures, verdicts, other policies."""

import json
from unittest import mock

import pytest

from bench import flood_real, policy_server, policy_worker, popularity_real
from bench.client import RequestResult
from bench.sim.baselines.eviction import Ranked
from bench.sim.baselines.sharing import Fcfs
from bench.sim_real import Played
from bench.swap_log import read_swaps
from engine.parts import EngineParts
from engine.worker import main as worker
from gateway.cli import main as cli
from gateway.cli import serve
from gateway.dispatch.dispatcher import Dispatcher
from gateway.policy.placement import Placement
from gateway.server import supervisor
from gateway.settings import Settings


def line(at: float, message: str) -> str:
    return json.dumps({"at": at, "message": message})


def result(
    ttft_s: float, tokens: int = 5, tpot_s: float = 0.01, error: str = "", due_s: float = 0.0
) -> RequestResult:
    first_s = due_s + ttft_s
    return RequestResult(
        0,
        due_s,
        first_s=None if error else first_s,
        last_s=None if error else first_s + tpot_s * (tokens - 1),
        completion_tokens=0 if error else tokens,
        error=error,
    )


def test_swaps_are_read_with_their_times() -> None:
    log = "\n".join(
        [
            "a line of somebody else",
            line(10.0, "swap model=m0 kind=load tier=disk bytes=100 seconds=0.250"),
            line(11.0, "swap model=m1 kind=evict tier=none bytes=100 seconds=0.001"),
            "swap model=m2 kind=load tier=disk bytes=1 seconds=1.0",
        ]
    )
    swaps = read_swaps(log)
    assert [(s.at, s.model, s.kind, s.seconds) for s in swaps] == [
        (10.0, "m0", "load", 0.25),
        (11.0, "m1", "evict", 0.001),
    ]


def test_a_refused_request_is_never_good_and_has_no_latency() -> None:
    results = [result(0.1), result(0.3), result(5.0), result(0.1, tpot_s=1.0), result(0, error="x")]
    played = Played(results, 0.0, {"worker": 1.0}, 10.0, 0.9, [5.0, 1.0])
    swaps = read_swaps(line(1.0, "swap model=m kind=load tier=disk bytes=1 seconds=2.0"))
    found = popularity_real.figures(played, swaps, slo_ttft_s=2.0, slo_tpot_s=0.1)
    assert (found["requests"], found["refused"], found["errors"]) == (5, 1, {"x": 1})
    assert found["goodput"] == pytest.approx(0.2)
    assert found["good_share"] == pytest.approx(0.4)
    assert (found["loads"], found["reload_s"], found["load_share"]) == (1, 2.0, 0.2)
    assert found["tok_s"] == 2.0
    assert found["ttft_p50_s"] == pytest.approx(0.2)


def test_the_summary_is_the_median_and_ours_over_the_others() -> None:
    rows = [
        dict.fromkeys(popularity_real.FIGURES, value) | {"arm": arm}
        for arm, value in (("ours", 1.0), ("ours", 3.0), ("ours", 2.0), ("lru", 4.0))
    ]
    summary = popularity_real.summarise(rows)
    assert summary["arms"]["ours"]["reload_s"]["median"] == 2.0
    assert summary["ours_over"]["lru"]["reload_s"] == 0.5
    assert "0.50" in popularity_real.table(summary)


def test_verdicts_of_the_flood() -> None:
    ours = {"p99_ratio": 1.4, "p99_added_s": 0.3, "load_max_s": 0.2, "tok_s": 98.0}
    resident = flood_real.verdicts("resident", ours, {"tok_s": 100.0})
    assert [row["reached"] for row in resident.values()] == [True, True]
    cold = flood_real.verdicts("cold", ours, {"tok_s": 200.0})
    assert [row["reached"] for row in cold.values()] == [False, False]
    assert flood_real.verdicts("cold", None, None) == {}


def test_the_server_gets_the_policies_that_are_asked_for() -> None:
    made: list[Dispatcher] = []

    def run(argv: list[str]) -> int:
        assert argv == ["serve", "--port", "1"]
        made.append(vars(supervisor)["Dispatcher"](Settings()))
        assert "bench.policy_worker" in vars(serve)["WORKER_COMMAND"]
        return 0

    with mock.patch.object(cli, "main", run):
        options = ["--evict", "lru", "--place", "eager", "--share", "fcfs"]
        assert policy_server.main([*options, "serve", "--port", "1"]) == 0
        assert policy_server.main(["serve", "--port", "1"]) == 0
    other, plain = made
    assert isinstance(other._share, Fcfs)
    assert not isinstance(plain._share, Fcfs)
    assert isinstance(plain._fleet._placement, Placement)
    assert plain._fleet._placement._gather_wait_s == Settings().gather_wait_s
    assert supervisor.serve.__module__ == "gateway.server.supervisor", "nothing stays replaced"


def test_the_worker_gets_the_eviction_policy_that_is_asked_for() -> None:
    seen: list[object] = []
    of_device = EngineParts(lay_out=mock.Mock())

    def engine(config: object, backend: object, parts: EngineParts) -> None:
        assert parts.lay_out is of_device.lay_out, "the device's own parts stay"
        seen.append(parts.eviction)

    def main(argv: list[str]) -> int:
        assert argv == ["--config", "{}"]
        vars(worker)["Engine"](mock.Mock(), mock.Mock(), of_device)  # as `serve` makes it
        return 7

    with (
        mock.patch.object(policy_worker, "Engine", engine),
        mock.patch.object(worker, "main", main),
    ):
        assert policy_worker.main(["--evict", "lru", "--config", "{}"]) == 7
        assert policy_worker.main(["--evict", "ours", "--config", "{}"]) == 7
    assert isinstance(seen[0], Ranked)
    assert seen[1] is None, "the product's own"
