"""Requests to encoders in the dispatcher: what is sent, what comes back, who may go on."""

import msgspec
import pytest

from engine.protocol import EncodeInputs, Submit
from gateway.dispatch.tickets import RequestStream
from gateway.errors import ApiError
from gateway.settings.settings import Settings
from gateway.types import PreparedRequest, TokenEvent
from tests.gateway import scripted_worker
from tests.gateway.scripted_worker import Rig, ScriptedWorker, hosted, prepared, principal, served


def encoding(request_id: str, *, continues: bool = False, revision: str = "r1") -> PreparedRequest:
    """Two inputs of two tokens."""
    return msgspec.structs.replace(
        prepared(request_id, max_tokens=0, revision=revision),
        kind="embedding",
        encode=EncodeInputs([2, 2], [0, 0, 0, 1]),
        continues=continues,
    )


def run(rig: Rig, request: PreparedRequest) -> RequestStream:
    return rig.dispatcher.run(request, principal("t"))


def only_event(stream: RequestStream) -> TokenEvent:
    event = stream.take()
    assert event is not None
    assert event.finish is not None
    assert stream.take() is None
    return event


def sent(worker: ScriptedWorker) -> list[Submit]:
    return [message for message in worker.sent if isinstance(message, Submit)]


def test_inputs_go_out_and_rows_come_back() -> None:
    rig, worker = served()
    stream = run(rig, encoding("a"))
    [submit] = sent(worker)
    assert (submit.encode, submit.max_tokens) == (EncodeInputs([2, 2], [0, 0, 0, 1]), 0)
    worker.vectors("a", b"12345678")
    event = only_event(stream)
    assert (event.vectors, event.token_ids) == (b"12345678", [])
    assert worker.acked == []  # not before it is posted
    rig.dispatcher.ack_usage(["a"])
    assert worker.acked == [("a", 1)]


def test_an_end_without_rows_is_acknowledged_at_once() -> None:
    rig, worker = served()
    stream = run(rig, encoding("a"))
    stream.abort()
    worker.finish("a", "abort", generated=0)
    assert only_event(stream).vectors == b""
    assert worker.acked == [("a", 1)]


def test_a_dead_workers_piece_is_sent_again_and_then_refused() -> None:
    rig = Rig()
    first, second = rig.worker("first"), rig.worker("second")
    stream = run(rig, encoding("a"))
    holder, other = (first, second) if sent(first) else (second, first)
    holder.die()
    assert other.submitted == ["a/2"]
    assert stream.attempt == 2
    other.vectors("a", b"late", attempt=1)  # of the first try: nobody's
    assert stream.take() is None
    other.die()
    with pytest.raises(ApiError, match="2 workers stopped"):
        stream.take()


def test_a_piece_of_an_admitted_request_goes_on() -> None:
    rig = Rig(Settings(max_queue_per_tenant=1))
    run(rig, encoding("waits"))
    with pytest.raises(ApiError, match="full"):
        run(rig, encoding("b"))
    run(rig, encoding("c", continues=True))
    rig.dispatcher.begin_drain()
    with pytest.raises(ApiError, match="shutting down"):
        run(rig, encoding("d"))
    run(rig, encoding("e", continues=True))
    assert rig.worker().submitted == ["waits", "c", "e"]


def test_no_piece_runs_on_another_revision() -> None:
    rig, worker = served()
    run(rig, encoding("a"))
    rig.dispatcher.set_catalog([hosted("m", "r2")])
    with pytest.raises(ApiError, match="replaced"):
        run(rig, encoding("b", continues=True))
    assert run(rig, encoding("c", revision="r2"))
    rig.dispatcher.set_catalog([])
    with pytest.raises(ApiError, match="no longer available"):
        run(rig, encoding("d", continues=True))
    assert "b" not in worker.submitted


def test_a_worker_that_knows_better_is_a_clear_refusal() -> None:
    rig, worker = served()
    stream = run(rig, encoding("a"))
    worker.refuse("a", "wrong_task", retryable=False)
    with pytest.raises(ApiError) as caught:
        stream.take()
    assert (caught.value.kind.code, caught.value.param) == ("wrong_task", "model")


@pytest.mark.parametrize("kv_bytes", [0, 2])
def test_what_an_encoder_lacks_is_nobodys_memory(
    monkeypatch: pytest.MonkeyPatch, kv_bytes: int
) -> None:
    monkeypatch.setattr(scripted_worker, "KV_BYTES", kv_bytes)
    rig, worker = served(kv_tokens=6)
    run(rig, encoding("a"))
    run(rig, encoding("b"))
    assert worker.submitted == ["a"]
    [capacity] = rig.dispatcher._fleet
    assert capacity.is_kv_short == bool(kv_bytes)
    worker.vectors("a", b"1234")
    worker.status()
    assert worker.submitted == ["a", "b"]


def test_what_it_took_is_charged() -> None:
    rig, worker = served()
    stream = run(rig, encoding("a"))
    worker.vectors("a", b"1234")
    assert only_event(stream).vectors == b"1234"
    assert rig.dispatcher.snapshot().service_s_by_tenant == {"t": 0.1}
