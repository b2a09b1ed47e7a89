"""The outbox against a plain list: first finish kept, oldest out first, owners kept apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Finish, Usage
from engine.worker.usage_outbox import UsageOutbox

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
