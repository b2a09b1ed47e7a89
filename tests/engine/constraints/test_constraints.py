"""The constraint process: the same masks as in this process, and no harm from any constraint."""

import json
import mmap
import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.constraints.constraints import Constraints, Session
from engine.errors import RequestRefused
from engine.grammar.child import MAX_TOKENIZERS, TOO_MUCH, ConstraintChild
from engine.grammar.messages import (
    HEADER_BYTES,
    Done,
    Limits,
    Open,
    TokenizerSource,
    decode_from_child,
)
from engine.grammar.structured import Matcher
from engine.protocol import Constraint
from tests.engine.grammar.test_structured import (
    DEMO,
    END,
    EOS,
    VOCAB,
    compiled,
    token_id,
    tokenizer,
)

SOURCE = TokenizerSource(str(DEMO), VOCAB, (EOS, END))
ANY_OBJECT = Constraint("json_object")


@pytest.fixture(name="constraints")
def _constraints() -> Iterator[Constraints]:
    made = Constraints(4, Limits(compile_s=0.4))
    yield made
    made.shutdown()


def opened(
    constraints: Constraints, constraint: Constraint, *output_ids: int, tenant: str = ""
) -> Session:
    session = constraints.open(SOURCE, constraint, output_ids, tenant)
    constraints.wait([session], 120)
    return session


def expected_mask(constraint: Constraint, output_ids: list[int]) -> torch.Tensor:
    row = bytearray(-(-VOCAB // 32) * 4)
    matcher = Matcher(compiled(constraint.kind, constraint.text), output_ids)
    matcher.mask_into(memoryview(row))
    return torch.frombuffer(row, dtype=torch.int32)


def assert_mask(constraints: Constraints, session: Session) -> None:
    assert session.state == "ready", session.reason
    expected = expected_mask(session.key[1], session.output_ids)
    assert torch.equal(constraints.mask(session), expected)


def hostile_grammars() -> dict[str, Constraint]:
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(20_000)) + 'r20000: "b"\n'
    parts = " & ".join(f"/(.*a.{{{i}}}.*)/" for i in range(40))
    double = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "b"\n'
    levels: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}},
            "required": ["a"],
        }
        for i in range(5000)
    }
    levels["d5000"] = {"type": "null"}
    return {
        "takes a deep stack": Constraint("grammar", chain),
        "takes minutes": Constraint("grammar", f"start: T\nT: {parts}\n"),
        "doubles sixty times": Constraint("grammar", double),
        "deep by references": Constraint(
            "json_schema", json.dumps({"$defs": levels, "$ref": "#/$defs/d0"})
        ),
    }


def test_masks_are_those_of_this_process(constraints: Constraints) -> None:
    texts = {
        Constraint("json_schema", '{"type": "array", "items": {"type": "boolean"}}'): "[true, fal",
        Constraint("regex", "(ab|cd)+"): "abcdab",
        ANY_OBJECT: '{"a b": [1.5e3, {}',
    }
    sessions = [constraints.open(SOURCE, constraint) for constraint in texts]
    constraints.wait(sessions, 120)
    rest = {
        session: tokenizer().encode(text, add_special_tokens=False).ids
        for session, text in zip(sessions, texts.values(), strict=True)
    }
    while rest:
        for session, ids in list(rest.items()):
            assert_mask(constraints, session)
            if not ids:
                del rest[session]
            else:
                constraints.advance(session, ids.pop(0))
        constraints.wait(rest)
    assert constraints.num_restarts == 0


def test_a_session_knows_when_its_output_is_complete(constraints: Constraints) -> None:
    session = opened(constraints, Constraint("json_schema", '{"enum": [true]}'))
    for token in tokenizer().encode("true", add_special_tokens=False).ids:
        assert not session.finished
        constraints.advance(session, token)
        constraints.wait([session])
    assert session.finished
    assert_mask(constraints, session)


def test_refusals_have_a_reason_and_are_remembered(constraints: Constraints) -> None:
    constraint = Constraint("json_schema", '{"not": {}}')
    session = opened(constraints, constraint)
    assert session.state == "refused"
    assert "not" in session.reason
    with pytest.raises(RequestRefused, match="not") as caught:
        constraints.open(SOURCE, constraint)
    assert caught.value.code == "invalid_constraint"
    with pytest.raises(RequestRefused, match="tokens"):
        constraints.open(TokenizerSource(str(DEMO), 1 << 20, (1,)), ANY_OBJECT)


def test_what_has_begun_is_broken_rather_than_refused(constraints: Constraints) -> None:
    """After a restart a constraint may be tried again whose verdict is forgotten."""
    session = opened(constraints, Constraint("json_schema", '{"not": {}}'), token_id("{"))
    assert session.state == "broken"
    assert "not" in session.reason


def test_what_is_remembered_is_small(constraints: Constraints) -> None:
    for text in ('{"not": {}}', json.dumps({"enum": ["a" * 100_000]})):
        constraints.close(opened(constraints, Constraint("json_schema", text)))
    remembered = constraints._verdicts.items()
    assert [bool(verdict) for _, (_, verdict) in remembered] == [True, False]
    assert all(len(key) + len(verdict) < 1000 for key, (_, verdict) in remembered)


@pytest.mark.parametrize("name", hostile_grammars())
def test_a_hostile_constraint_is_refused_and_harms_nobody(
    constraints: Constraints, name: str
) -> None:
    honest = opened(constraints, ANY_OBJECT)
    hostile = constraints.open(SOURCE, hostile_grammars()[name])
    token = token_id("{")
    constraints.advance(honest, token)
    constraints.wait([honest], 120)
    assert_mask(constraints, honest)
    constraints.wait([hostile], 120)
    # A stack that is large enough lets one pass, a processor that is quick enough another.
    lucky = name in ("takes a deep stack", "deep by references")
    assert hostile.state == "refused" or (lucky and hostile.state == "ready")
    assert constraints.num_restarts == 0
    assert_mask(constraints, honest)


def test_too_many_sessions_are_refused_until_one_is_closed(constraints: Constraints) -> None:
    sessions = [constraints.open(SOURCE, ANY_OBJECT) for _ in range(4)]
    with pytest.raises(RequestRefused) as caught:
        constraints.open(SOURCE, ANY_OBJECT)
    assert caught.value.code == "overloaded"
    constraints.wait(sessions, 120)
    constraints.close(sessions[1])
    constraints.close(sessions[1])
    assert_mask(constraints, opened(constraints, Constraint("regex", "abc")))


def test_a_row_is_not_reused_while_an_answer_is_under_way(constraints: Constraints) -> None:
    """Else the answer to the old session would be taken for one to the new."""
    sessions = [constraints.open(SOURCE, ANY_OBJECT) for _ in range(4)]
    for session in sessions:
        constraints.close(session)
    with pytest.raises(RequestRefused):
        constraints.open(SOURCE, Constraint("regex", "x+"))
    for _ in range(1000):
        constraints.poll(1.0)
        if len(constraints._free) == 4:
            break
    for text in ("x+", "y+", "z+", "xyz"):
        assert_mask(constraints, opened(constraints, Constraint("regex", text)))


def test_sessions_survive_the_end_of_the_process(constraints: Constraints) -> None:
    ids = tokenizer().encode('{"a": [', add_special_tokens=False).ids
    session = opened(constraints, ANY_OBJECT, *ids[:2])
    stepping = opened(constraints, ANY_OBJECT)
    constraints.advance(stepping, ids[0])
    process = constraints._process
    assert process._child is not None
    process._child.send_signal(signal.SIGKILL)
    process._child.wait()
    constraints.wait([session, stepping], 120)
    for _ in range(1000):  # the end shows in the pipe
        constraints.poll(0.1)
        if constraints.num_restarts:
            break
    constraints.wait([session, stepping], 120)
    assert constraints.num_restarts == 1
    assert_mask(constraints, session)
    assert_mask(constraints, stepping)
    assert stepping.output_ids == ids[:1]


def test_the_session_it_ended_with_is_too_dear(constraints: Constraints) -> None:
    """By SIGPROF, the limit of a step: it is the client's, and known from then on."""
    culprit, other = opened(constraints, ANY_OBJECT), opened(constraints, Constraint("regex", "x+"))
    process = constraints._process
    assert process._child is not None
    process._child.send_signal(signal.SIGSTOP)
    constraints.advance(culprit, token_id("{"))
    constraints.flush()
    process._current[0] = culprit.row  # as if its step never ended
    process._child.send_signal(signal.SIGPROF)
    process._child.send_signal(signal.SIGCONT)
    constraints.wait([culprit], 120)
    assert culprit.state == "refused"
    assert "CPU time" in culprit.reason
    constraints.close(culprit)
    with pytest.raises(RequestRefused, match="too expensive to enforce before"):
        constraints.open(SOURCE, ANY_OBJECT)
    constraints.wait([other], 120)
    assert_mask(constraints, other)
    assert_mask(constraints, opened(constraints, ANY_OBJECT, tenant="another"))


def test_a_process_that_does_not_answer_is_given_up(constraints: Constraints) -> None:
    session = opened(constraints, ANY_OBJECT)
    process = constraints._process
    assert process._child is not None
    process._child.send_signal(signal.SIGSTOP)
    constraints.advance(session, token_id("{"))
    constraints.wait([session], 0.05)
    assert session.state == "broken"
    constraints.close(session)
    assert_mask(constraints, opened(constraints, ANY_OBJECT))


def test_a_process_that_does_not_read_holds_nobody_up(constraints: Constraints) -> None:
    """What is sent to it in the meantime is far more than a pipe holds."""
    session = opened(constraints, ANY_OBJECT)
    process = constraints._process
    assert process._child is not None
    process._child.send_signal(signal.SIGSTOP)
    long = [Constraint("json_schema", json.dumps({"enum": [c * 400_000]})) for c in "ab"]
    others = [constraints.open(SOURCE, constraint) for constraint in long]
    constraints.advance(session, token_id("{"))
    constraints.flush()
    constraints.poll()
    assert session.state == "stepping"
    process._child.send_signal(signal.SIGCONT)
    constraints.wait([session, *others], 120)
    assert_mask(constraints, session)


def test_a_process_that_does_not_read_can_be_ended(constraints: Constraints) -> None:
    session = opened(constraints, ANY_OBJECT)
    process = constraints._process
    assert process._child is not None
    process._child.send_signal(signal.SIGSTOP)
    long = Constraint("json_schema", json.dumps({"enum": ["a" * 400_000]}))
    hanging = constraints.open(SOURCE, long)
    constraints.wait([hanging], 0.05)
    assert hanging.state == "broken"
    constraints.wait([session], 120)
    assert_mask(constraints, session)


def test_answers_that_nobody_reads_do_not_stop_what_is_sent() -> None:
    """Hundreds of sessions: both directions of the pipe are full before anybody listens."""
    many = Constraints(900)
    sessions = [many.open(SOURCE, ANY_OBJECT) for _ in range(900)]
    many.wait(sessions, 120)
    assert {session.state for session in sessions} == {"ready"}
    many.shutdown()


def test_a_token_the_grammar_does_not_allow_breaks_the_session(constraints: Constraints) -> None:
    session = opened(constraints, ANY_OBJECT)
    constraints.advance(session, token_id("x"))
    constraints.wait([session], 120)
    assert session.state == "broken"
    assert_mask(constraints, opened(constraints, ANY_OBJECT))


def test_what_takes_too_much_says_so(constraints: Constraints) -> None:
    session = opened(constraints, hostile_grammars()["takes minutes"])
    assert session.reason == TOO_MUCH


def test_tokenizers_that_give_way_take_their_grammars_along(tmp_path: Path) -> None:
    """A grammar holds its tokenizer: kept, they would fill memory with tokenizers."""
    ours, theirs = multiprocessing.Pipe()
    memory = mmap.mmap(-1, HEADER_BYTES + 4 * VOCAB)
    child = ConstraintChild(theirs, memory, 1, Limits())
    text = DEMO.read_text()
    paths = [tmp_path / f"{n}.json" for n in range(MAX_TOKENIZERS + 2)]
    for n, path in enumerate(paths):
        path.write_text(text + " " * n)
    (tmp_path / "copy.json").write_bytes(paths[0].read_bytes())
    for path in (paths[0], tmp_path / "copy.json", *paths[1:]):
        source = TokenizerSource(str(path), VOCAB, (EOS, END))
        child._handle(Open(0, source, ANY_OBJECT, [], True))
        assert isinstance(decode_from_child(ours.recv_bytes()), Done)
        assert {key for key, _ in child._grammars} == child._compilers.keys()
        assert len(child._compilers) <= MAX_TOKENIZERS
        if path.name == "copy.json":
            assert len(child._compilers) == 1, "the same tokenizer in another place"
    ours.close()
    theirs.close()
