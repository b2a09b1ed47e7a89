"""Any order of gateways coming, asking, aborting, vanishing and acknowledging leaves whole books.

Whatever happens: tokens of a request arrive in order and without a gap, every request the engine
took ends in exactly one usage, and that usage is told to its gateway until it is acknowledged.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.protocol import Abort, AckUsage, Refused
from tests.engine.scripted_engine import ScriptedEngine
from tests.engine.worker_rig import Gateway, Rig, rig, submit

NAMES = ("g0", "g1", "g2")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("submit", "abort", "vanish", "hello", "ack", "garbage", "tick")),
        st.integers(0, len(NAMES) - 1),
        st.integers(0, 40),
    ),
    max_size=40,
)


@dataclass
class Client:
    """A gateway's life over several connections."""

    gateway: Gateway
    asked: list[str] = field(default_factory=list)
    usages: dict[str, int] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def settle(self) -> None:
        """Read the connection's messages into the books."""
        for message in self.gateway.all(Refused):
            self.refused.add(message.request_id)
        for name in self.asked:
            tokens = self.gateway.tokens(name)
            assert tokens == list(range(1, len(tokens) + 1))
            for finish in self.gateway.finishes(name):
                seen = self.usages.setdefault(name, finish.usage.generated_tokens)
                assert seen == finish.usage.generated_tokens >= len(tokens)


def act(r: Rig, clients: list[Client], what: str, who: int, number: int) -> None:
    client = clients[who]
    match what:
        case "submit":
            name = f"{who}-{len(client.asked)}"
            client.asked.append(name)
            client.gateway.send(submit(name, max_tokens=1 + number))
        case "abort" if client.asked:
            client.gateway.send(Abort(client.asked[number % len(client.asked)], 1))
        case "vanish":
            client.settle()
            client.gateway.close()
            client.gateway = r.connect(NAMES[who])
        case "hello":
            client.gateway.hello()
        case "ack":
            client.settle()
            client.gateway.send(AckUsage([(name, 1) for name in client.usages]))
        case "garbage":
            client.gateway.socket.send(bytes([number]) * number)
        case _:
            r.worker.tick()
    r.worker.check_integrity()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_books_stay_whole(steps: list[tuple[str, int, int]]) -> None:
    with rig(ScriptedEngine(max_requests=6, states={"m": "resident"})) as r:
        clients = [Client(r.connect(name)) for name in NAMES]
        for what, who, number in steps:
            act(r, clients, what, who, number)
        r.until(lambda: not r.engine.running)
        for client in clients:
            client.gateway.hello()

        def all_told() -> bool:
            for client in clients:
                client.settle()
            return set(r.engine.taken) == {name for c in clients for name in c.usages}

        r.until(all_told)
        assert not set(r.engine.taken) & {name for c in clients for name in c.refused}
        assert len(set(r.engine.taken)) == len(r.engine.taken)
        r.worker.check_integrity()
