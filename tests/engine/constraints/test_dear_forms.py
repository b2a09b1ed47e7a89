"""Forms that cost too much: others hardly notice, the request ends and is billed, and is known.

The trial that found them: 42 bytes of grammar blocked everybody's structured output for 99 s, free
of charge, past the rate limit, and were forgotten at once.
"""

import signal
import time
from collections.abc import Iterator

import pytest

from engine.constraints import constraints as module
from engine.constraints.constraints import Constraints, Session
from engine.constraints.cpu_shares import CREDIT_S, DEBT_S
from engine.errors import RequestRefused
from engine.grammar import Done, FromChild, Step, ToChild
from engine.protocol import Constraint
from tests.engine.constraints.test_constraints import SOURCE, assert_mask, opened
from tests.engine.grammar.test_structured import token_id, tokenizer

AMBIGUOUS = Constraint("grammar", "start: e\ne: e e | e e e | C\nC: /[a-z \\n]/\n")
WORDS = Constraint("regex", "(red|green|blue)( (red|green|blue))*")


@pytest.fixture(name="constraints")
def _constraints() -> Iterator[Constraints]:
    made = Constraints(32)
    yield made
    made.shutdown()


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def write(constraints: Constraints, session: Session, text: str) -> None:
    """As far as the form lets it."""
    for token in ids(text):
        if session.state != "ready":
            return
        constraints.advance(session, token)
        constraints.wait([session], 120)


def test_a_grammar_that_gets_ever_dearer_is_spent_soon_and_known(constraints: Constraints) -> None:
    session = opened(constraints, AMBIGUOUS, tenant="hostile")
    write(constraints, session, "the quick brown fox jumps over the lazy dog and runs away " * 3)
    assert session.state == "refused"
    assert session.output_ids, "what was made is billed"
    assert session.cpu_s < 1.0
    assert constraints.num_restarts == 0
    assert constraints.num_spent == 1
    constraints.close(session)
    with pytest.raises(RequestRefused, match="too expensive to enforce before") as caught:
        constraints.open(SOURCE, AMBIGUOUS, tenant="hostile")
    assert caught.value.code == "invalid_constraint"
    # What it costs depends on the output, which its caller can steer: no verdict on others.
    assert_mask(constraints, opened(constraints, AMBIGUOUS, tenant="other"))


def test_a_known_form_is_tried_again_after_a_while(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPENT_S", -1.0)
    for _ in range(2):
        session = opened(constraints, AMBIGUOUS, tenant="hostile")
        write(constraints, session, "the quick brown fox jumps over the lazy dog and runs away")
        assert session.state == "refused"
        constraints.close(session)


def test_what_does_not_compile_is_tried_again_after_a_while(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that others' forms had filled, or a busy machine, must not refuse it for good."""
    empty = Constraint("grammar", "start: missing\n")
    for kept_s, num_known in ((60.0, 1), (-1.0, 2)):
        monkeypatch.setattr(module, "SPENT_S", kept_s)
        constraints._verdicts.clear()
        session = constraints.open(SOURCE, empty, tenant="a")
        constraints.wait([session], 120)
        assert session.state == "refused"
        constraints.close(session)
        if num_known == 1:
            with pytest.raises(RequestRefused):
                constraints.open(SOURCE, empty, tenant="b")
            continue
        again = constraints.open(SOURCE, empty, tenant="b")
        constraints.wait([again], 120)
        assert again.state == "refused"
        assert "missing" in again.reason
        constraints.close(again)


def test_what_is_known_is_bounded(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPENT", 3)
    session = opened(constraints, WORDS)
    for number in range(9):
        session.tenant = str(number)
        constraints._spend(session, "as if", time.monotonic())
    assert len(constraints._spent) == 3
    with pytest.raises(RequestRefused, match="as if"):
        constraints.open(SOURCE, WORDS, tenant="8")
    constraints.open(SOURCE, WORDS, tenant="0")


def test_cpu_time_is_counted_over_all_steps(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is dear: the sum is."""
    monkeypatch.setattr(module, "SESSION_S", 0.0)
    monkeypatch.setattr(module, "SESSION_STEP_S", 0.0)
    session = opened(constraints, WORDS)
    session.cpu_s = 0.1
    write(constraints, session, "red")
    assert session.state == "refused"
    assert "CPU time" in session.reason


def test_a_dear_tenants_rows_come_one_by_one_and_others_rows_before(
    constraints: Constraints,
) -> None:
    """Eight rows of one tenant wait; another tenant's row does not wait for them."""
    constraints._shares.pay("hostile", 1.0, 0.0, time.monotonic())
    dear = [constraints.open(SOURCE, WORDS, tenant="hostile") for _ in range(8)]
    constraints.wait(dear, 120)
    honest = opened(constraints, WORDS, tenant="honest")
    sent: list[object] = []
    send = constraints._process.send

    def sending(message: ToChild) -> None:
        sent.append(message)
        send(message)

    constraints._process.send = sending  # type: ignore[method-assign]
    for session in dear:
        constraints.advance(session, ids("red")[0])
    constraints.advance(honest, ids("red")[0])
    constraints.flush()
    told = [message.tokens for message in sent if isinstance(message, Step)]
    assert told[0] == [(honest.row, ids("red")[0])]
    assert sum(map(len, told[1:])) <= 1, "of the dear ones one at most is under way"
    assert all(session.is_dear for session in dear)
    assert not honest.is_dear
    constraints.wait([honest, *dear], 120)
    for session in (honest, *dear):
        assert_mask(constraints, session)
        assert not session.is_dear


def test_a_waiting_row_that_is_closed_gives_its_place_back(constraints: Constraints) -> None:
    constraints._shares.pay("hostile", 1.0, 0.0, time.monotonic())
    sessions = [constraints.open(SOURCE, WORDS, tenant="hostile") for _ in range(4)]
    for session in sessions[1:]:
        constraints.close(session)
    assert len(constraints._sessions) == 1, "the first is under way"
    constraints.wait(sessions[:1], 120)
    for session in sessions[:1]:
        constraints.advance(session, ids("red")[0])
    constraints.wait(sessions[:1], 120)
    assert_mask(constraints, sessions[0])


def test_a_tenant_that_used_too_much_has_no_more_forms_for_a_while(
    constraints: Constraints,
) -> None:
    running = opened(constraints, WORDS, tenant="hostile")
    ordinary = opened(constraints, WORDS, tenant="hostile")
    constraints._shares.pay("hostile", CREDIT_S + DEBT_S + 1.0, 0.0, time.monotonic())
    with pytest.raises(RequestRefused, match=r"try again in \d+ s"):
        constraints.open(SOURCE, Constraint("regex", "new"), tenant="hostile")
    running.cpu_s = 0.3
    write(constraints, running, "red")
    write(constraints, ordinary, "red")
    assert running.state == "refused"
    assert "others of yours" in running.reason
    assert_mask(constraints, ordinary)
    assert_mask(constraints, opened(constraints, WORDS, tenant="honest"))


def test_many_ends_of_the_process_leave_others_their_state(constraints: Constraints) -> None:
    """Each end is one form's doing: whoever has had an answer since begins to count anew."""
    honest = opened(constraints, WORDS, tenant="honest")
    process = constraints._process
    for number in range(module.MAX_REOPENED + 3):
        write(constraints, honest, "red" if not number else " red")
        text = Constraint("regex", f"a{number}")
        culprit = opened(constraints, text, tenant=f"hostile {number}")
        process._current[0] = culprit.row
        assert process._child is not None
        process._child.send_signal(signal.SIGXCPU)
        while constraints.num_restarts == number:
            constraints.poll(0.1)
        assert culprit.state == "refused"
        constraints.close(culprit)
        constraints.wait([honest], 120)
        assert_mask(constraints, honest)


def test_a_form_whose_client_left_is_remembered_all_the_same(constraints: Constraints) -> None:
    session = opened(constraints, AMBIGUOUS, tenant="hostile")
    constraints.advance(session, token_id("a"))
    constraints.flush()
    constraints.close(session)
    process = constraints._process
    assert process._child is not None
    process._child.send_signal(signal.SIGSTOP)
    process._current[0] = session.row
    process._child.send_signal(signal.SIGPROF)
    process._child.send_signal(signal.SIGCONT)
    while constraints._sessions:
        constraints.poll(0.1)
    if constraints.num_restarts:  # its last answer may have come before
        with pytest.raises(RequestRefused, match="before"):
            constraints.open(SOURCE, AMBIGUOUS, tenant="hostile")


def test_every_answer_says_what_it_took(constraints: Constraints) -> None:
    told: list[float] = []
    take = constraints._take

    def taking(session: Session, answer: FromChild, now_s: float) -> None:
        assert isinstance(answer, Done)
        told.append(answer.cpu_s)
        take(session, answer, now_s)

    constraints._take = taking  # type: ignore[method-assign]
    session = opened(constraints, WORDS)
    write(constraints, session, "red green")
    assert len(told) == 1 + len(ids("red green"))
    assert all(cpu_s > 0 for cpu_s in told)
    assert session.cpu_s == pytest.approx(sum(told))
