"""The outbox against a plain list: first finish kept, oldest out first, owners kept apart."""

import socket as sockets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import (
    PROTOCOL_VERSION,
    AckUsage,
    AdoptUsage,
    Finish,
    Hello,
    StepOutput,
    Usage,
    Welcome,
    WorkerStatus,
    encode,
)
from engine.worker import worker_link
from engine.worker.worker_link import UsageOutbox, WorkerLink
from tests.engine.worker_rig import PATIENCE_S, Gateway, Rig, rig, submit, worker_config

GATEWAYS = st.sampled_from(("g1", "g2"))
KEYS = st.tuples(st.sampled_from("abcdef"), st.integers(1, 2))


def finish(tokens: int) -> Finish:
    return Finish("stop", Usage(1, 0, tokens, 0.0))


@given(
    st.integers(1, 5),
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), GATEWAYS, KEYS),
            st.tuples(st.just("ack"), GATEWAYS, KEYS),
        )
    ),
)
def test_against_a_list(capacity: int, steps: list[tuple[str, str, tuple[str, int]]]) -> None:
    outbox = UsageOutbox(capacity)
    model: list[tuple[str, tuple[str, int], Finish]] = []
    num_dropped = 0
    for number, (what, gateway_id, key) in enumerate(steps):
        if what == "add":
            outbox.add(gateway_id, key, finish(number))
            if all(key != kept for _, kept, _ in model):
                model.append((gateway_id, key, finish(number)))
            if len(model) > capacity:
                model.pop(0)
                num_dropped += 1
        else:
            left = [entry for entry in model if entry[:2] != (gateway_id, key)]
            assert outbox.ack(gateway_id, [key]) == len(model) - len(left)
            model = left
        assert len(outbox) == len(model)
        assert outbox.num_dropped == num_dropped
        for name in ("g1", "g2"):
            told = [(d.request_id, d.attempt, d.token_ids, d.finish) for d in outbox.unacked(name)]
            assert told == [(*key, [], end) for owner, key, end in model if owner == name]


def test_it_must_hold_something() -> None:
    with pytest.raises(ValueError, match="at least one"):
        UsageOutbox(0)


def finish_reasons(gateway: Gateway, request_id: str) -> list[str]:
    return [finish.reason for finish in gateway.finishes(request_id)]


def outbox_size(r: Rig) -> float:
    gateway = next(g for g in r.gateways if not g.socket.closed)
    return gateway.status.counters["usage_outbox_size"]


def has_read_all(r: Rig, gateway: Gateway, request_id: str) -> bool:
    """Whether the gateway has the newest token of its one request."""
    gateway.pump()
    running = r.engine.running.get((request_id, 1))
    outputs = (m for m in reversed(gateway.received) if isinstance(m, StepOutput))
    newest = next(outputs, None)
    if running is None or running.num_generated == 0:
        return True
    return newest is not None and newest.deltas[-1].token_ids == [running.num_generated]


def test_a_vanished_gateways_requests_are_aborted_and_told_when_it_is_back() -> None:
    with rig() as r:
        bystander, gone = r.connect("other"), r.connect("g")
        bystander.send(submit("b", max_tokens=10**6))
        gone.send(submit("done", max_tokens=2))
        gone.send(submit("a", max_tokens=10**6))
        r.until(lambda: len(gone.tokens("a")) > 5)
        gone.close()
        r.until(lambda: ("a", 1) not in r.engine.running)
        assert r.worker.counters.peers_lost == 1
        assert ("b", 1) in r.engine.running
        back = r.connect("g")
        r.until(lambda: len(back.finishes("a")) == 1 and len(back.finishes("done")) == 1)
        assert finish_reasons(back, "a") == ["abort"]
        assert finish_reasons(back, "done") == ["length"]
        assert back.tokens("a") == back.tokens("done") == []  # usage only
        assert bystander.finishes("a") == []
        back.send(AckUsage([("a", 1), ("done", 1)]))
        r.until(lambda: outbox_size(r) == 0)
        again = r.connect("g")
        assert again.all(StepOutput) == []


def test_the_finishes_of_a_lost_gateway_go_to_the_one_that_closes_its_books() -> None:
    with rig() as r:
        other, lost = r.connect("other"), r.connect("lost")
        lost.send(submit("done#1", max_tokens=2))
        lost.send(submit("journal", max_tokens=2))  # no open record of it in the database yet
        lost.send(submit("a", max_tokens=10**6))
        r.until(lambda: len(lost.tokens("a")) > 5)
        other.send(AdoptUsage("lost", ["a", "done"]))
        other.send(submit("b", max_tokens=1))
        r.until(lambda: bool(other.finishes("b")))
        assert other.finishes("done#1") == []  # it is connected, and closes its own books
        lost.close()
        r.until(lambda: ("a", 1) not in r.engine.running)
        other.send(AdoptUsage("lost", ["a", "done"]))
        r.until(lambda: len(other.finishes("a")) == 1 and len(other.finishes("done#1")) == 1)
        assert finish_reasons(other, "a") == ["abort"]
        assert other.tokens("a") == other.tokens("done#1") == []
        assert other.finishes("journal") == []
        back = r.connect("lost")
        r.until(lambda: len(back.finishes("journal")) == 1)
        back.send(AckUsage([("a", 1)]))  # not its own any more
        back.send(submit("c", max_tokens=1))
        r.until(lambda: bool(back.finishes("c")))
        assert back.finishes("a") == []
        other.send(AckUsage([("a", 1), ("done#1", 1), ("b", 1)]))
        r.until(lambda: outbox_size(r) == 2)


def test_a_gateway_on_a_new_connection_gets_the_old_ones_finishes_not_its_tokens() -> None:
    with rig() as r:
        old = r.connect("g")
        old.send(submit("a", max_tokens=10**6))
        r.until(lambda: len(old.tokens("a")) > 2)
        new = r.connect("g")
        r.until(lambda: bool(new.finishes("a")))
        assert finish_reasons(new, "a") == ["abort"]
        assert new.tokens("a") == []
        new.send(submit("b", max_tokens=2))
        r.until(lambda: bool(new.finishes("b")))
        assert new.tokens("b") == [1, 2]


def test_hello_again_on_one_connection_changes_nothing() -> None:
    with rig() as r:
        gateway = r.connect("g")
        gateway.send(submit("a", max_tokens=10**6))
        gateway.send(submit("b", max_tokens=1))
        r.until(lambda: bool(gateway.finishes("b")) and len(gateway.tokens("a")) > 2)
        gateway.hello()
        r.until(lambda: len(gateway.finishes("b")) == 2)  # told again, not acknowledged yet
        assert ("a", 1) in r.engine.running
        tokens = gateway.tokens("a")
        assert tokens == list(range(1, len(tokens) + 1))


def test_finishes_are_acknowledged_only_by_their_gateway() -> None:
    with rig() as r:
        one, two = r.connect("g1"), r.connect("g2")
        one.send(submit("a", max_tokens=1))
        r.until(lambda: bool(one.finishes("a")))
        two.send(AckUsage([("a", 1), ("never", 9)]))
        r.until(lambda: outbox_size(r) == 1)
        one.send(AckUsage([("a", 1)]))
        r.until(lambda: outbox_size(r) == 0)


def test_many_finishes_are_told_again_in_batches() -> None:
    with rig() as r:
        r.engine.max_requests = 2000
        gateway = r.connect("g")
        for number in range(1100):
            gateway.send(submit(str(number), max_tokens=1))
        r.until(lambda: len(gateway.finishes("1099")) == 1)
        gateway.close()
        back = r.connect("g")
        r.until(lambda: bool(back.finishes("1099")))
        assert [len(output.deltas) for output in back.all(StepOutput)] == [512, 512, 76]


def test_the_outbox_is_bounded_and_counts_what_fell_out() -> None:
    with rig(max_unacked_finishes=2) as r:
        gateway = r.connect("g")
        for name in "abc":
            gateway.send(submit(name, max_tokens=1))
            r.until(lambda name=name: bool(gateway.finishes(name)))  # type: ignore[misc]
        r.until(lambda: gateway.status.counters["usage_outbox_dropped"] == 1)
        gateway.hello()
        r.until(lambda: len(gateway.finishes("c")) == 2)
        assert len(gateway.finishes("a")) == 1


def test_a_gateway_that_does_not_read_is_given_up_and_stalls_nobody() -> None:
    with rig(send_high_water=200) as r:
        r.engine.paused = True
        slow = r.connect("slow", RCVHWM=1, RCVBUF=4096)
        quick = r.connect("quick")
        r.gateways.remove(slow)  # nobody pumps it any more
        slow.send(submit("s", max_tokens=10**9))
        quick.send(submit("q", max_tokens=10**9))
        r.until(lambda: len(r.engine.running) == 2)
        r.engine.paused = False
        longest = 0.0
        deadline = time.monotonic() + PATIENCE_S
        while r.worker.counters.peers_lost == 0:
            started = time.perf_counter()
            r.worker.tick()
            longest = max(longest, time.perf_counter() - started)
            while not has_read_all(r, quick, "q"):
                assert time.monotonic() < deadline
        r.until(lambda: ("s", 1) not in r.engine.running)
        assert longest < 1.0
        assert ("q", 1) in r.engine.running
        tokens = quick.tokens("q")
        assert tokens == list(range(1, len(tokens) + 1))
        slow.close()
        back = r.connect("slow")
        r.until(lambda: finish_reasons(back, "s") == ["abort"])


def test_statuses_discover_a_gateway_that_is_gone_and_asked_nothing() -> None:
    with rig() as r:
        watcher, gone = r.connect("watcher"), r.connect("g")
        gone.close()
        r.until(lambda: r.worker.counters.peers_lost == 1)
        told = len(watcher.all(WorkerStatus))
        r.until(lambda: len(watcher.all(WorkerStatus)) > told)


def test_a_peer_that_observes_hears_what_all_have_submitted_and_what_runs() -> None:
    with rig() as r:
        one, two, watcher = r.connect("g1"), r.connect("g2"), r.connect("d", hello=False)
        watcher.send(Hello(PROTOCOL_VERSION, "d", observes=True))
        r.until(lambda: len(watcher.all(Welcome)) == 1)  # or the others' messages may come first
        one.send(submit("a", max_tokens=10**6))
        two.send(submit("b", max_tokens=10**6))
        two.send(submit("b", max_tokens=10**6))  # a duplicate arrives too

        def taken(gateway: Gateway) -> list[tuple[str, int]]:
            gateway.pump()
            return [key for status in gateway.all(WorkerStatus) for key in status.taken]

        r.until(lambda: sorted(taken(watcher)) == [("a", 1), ("b", 1), ("b", 1)])
        assert taken(one) == taken(two) == []
        assert watcher.all(StepOutput) == []
        watcher.send(Hello(PROTOCOL_VERSION, "d", observes=True))
        r.until(lambda: len(watcher.all(Welcome)) == 2)
        two.send(submit("c", max_tokens=1))
        r.until(lambda: taken(watcher)[3:] == [("c", 1)])


def free_port() -> int:
    with sockets.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def curve_keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@contextmanager
def far_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    port: int,
    own: tuple[str, str],
    worker_key: str,
    host: str = "127.0.0.1",
) -> Iterator[zmq.Socket[bytes]]:
    """A server's end of a connection to a worker on another machine."""
    socket = context.socket(zmq.DEALER)
    if worker_key:
        socket.setsockopt(zmq.CURVE_SERVERKEY, worker_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own[0].encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, own[1].encode())
    socket.setsockopt(zmq.IPV6, "[" in host)
    socket.connect(f"tcp://{host}:{port}")
    try:
        yield socket
    finally:
        socket.close(linger=0)


@pytest.mark.parametrize(
    "intruder",
    [
        pytest.param("allowed", id="the key is allowed"),
        pytest.param("unknown", id="another key"),
        pytest.param("wrong worker", id="another worker was expected"),
        pytest.param("plain", id="no encryption"),
    ],
)
def test_by_tcp_only_an_allowed_key_gets_an_answer(intruder: str) -> None:
    worker, server, stranger = curve_keys(), curve_keys(), curve_keys()
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        config = worker_config(
            directory,
            endpoint=f"tcp://127.0.0.1:{port}",
            secret_key=worker[1],
            allowed_keys=[stranger[0], server[0]] if intruder == "allowed" else [server[0]],
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = WorkerLink(context, config)
        own = server if intruder == "wrong worker" else stranger
        known = {"wrong worker": stranger[0], "plain": ""}.get(intruder, worker[0])
        try:
            with (
                far_socket(context, port, own, known) as socket,
                far_socket(context, port, server, worker[0]) as other,
            ):
                socket.send(encode(Hello(PROTOCOL_VERSION, "first")))
                heard = []
                if intruder == "allowed":
                    assert link.wait(PATIENCE_S)
                    heard += [message for _, message in link.receive(9)]
                other.send(encode(Hello(PROTOCOL_VERSION, "second")))
                assert link.wait(PATIENCE_S)
                time.sleep(0.1)  # for the first, were it let in
                received = list(link.receive(9))
                heard += [message for _, message in received]
                identity = received[-1][0]
                assert link.send(identity, Welcome(PROTOCOL_VERSION, "w", "e", "d"))
                assert other.poll(int(PATIENCE_S * 1e3))
        finally:
            link.close(0.0)
            context.destroy(linger=0)
    names = [message.gateway_id for message in heard if isinstance(message, Hello)]
    assert names == (["first", "second"] if intruder == "allowed" else ["second"])


@contextmanager
def far_link(port: int, host: str = "127.0.0.1") -> Iterator[tuple[WorkerLink, tuple[str, str]]]:
    """A worker's end, and a pair whose secret half is the worker's and public half is allowed."""
    keys = curve_keys()
    with tempfile.TemporaryDirectory() as directory:
        about = {"secret_key": keys[1], "allowed_keys": [keys[0]]}
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        config = worker_config(directory, endpoint=f"tcp://{host}:{port}", **about)
        link = WorkerLink(context, config)
        try:
            yield link, keys
        finally:
            link.close(0.0)
            context.destroy(linger=0)


def has_ipv6() -> bool:
    try:
        with sockets.socket(sockets.AF_INET6) as made:
            made.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["[::1]", "[::]"])
def test_a_worker_listens_on_an_ipv6_address(host: str) -> None:
    port = free_port()
    with far_link(port, host) as (link, keys):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with far_socket(context, port, keys, keys[0], "[::1]") as socket:
            socket.send(encode(Hello(PROTOCOL_VERSION, "g")))
            assert link.wait(PATIENCE_S)
        context.destroy(linger=0)


def test_a_connection_that_shows_no_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "HANDSHAKE_MS", 50)
    port = free_port()
    with far_link(port), sockets.create_connection(("127.0.0.1", port), PATIENCE_S) as silent:
        while silent.recv(1024):
            pass  # ZeroMQ's greeting, and then the end
