"""The catalog's state table, and registrations that die, are taken over or come too late."""

import itertools

import pytest
from sqlalchemy import Engine

from registry.audit import current_version
from registry.errors import AlreadyExists, InvalidValue, NotFound
from registry.models import catalog, registrations
from registry.models.catalog import TRANSITIONS, ModelRecord, PackFacts
from registry.session import reading, writing

NOW = 5000.0
FACTS = PackFacts("rev1", "rev1", "llama", "float32", 4096, 512, 1000)


def begin(engine: Engine, name: str = "tiny", now_at: float = NOW) -> ModelRecord:
    with writing(engine, "test") as session:
        return catalog.add_model(
            session, name, "/models/tiny", registrar_host="h", registrar_pid=7, now_at=now_at
        )


def reach(engine: Engine, state: str) -> ModelRecord:
    model = begin(engine)
    with writing(engine, "test") as session:
        if state == "ready":
            assert catalog.finish(session, model.registration, FACTS, now_at=NOW)
        if state == "failed":
            assert catalog.fail(session, model.registration, "parity", "differs", now_at=NOW)
        if state == "removed":
            catalog.remove(session, "tiny", now_at=NOW)
    return model


def state_of(engine: Engine) -> str:
    with reading(engine) as session:
        model = catalog.find_model(session, "tiny")
    assert model is not None
    return model.state


@pytest.mark.parametrize(("state", "target"), list(itertools.product(TRANSITIONS, TRANSITIONS)))
def test_states_change_only_by_the_table(engine: Engine, state: str, target: str) -> None:
    model = reach(engine, state)
    try:
        with writing(engine, "test") as session:
            if target == "registering":
                catalog.add_model(session, "tiny", "/models/tiny", now_at=NOW)
            elif target == "ready":
                catalog.finish(session, model.registration, FACTS, now_at=NOW)
            elif target == "failed":
                catalog.fail(session, model.registration, "x", "y", now_at=NOW)
            else:
                catalog.remove(session, "tiny", now_at=NOW)
    except (AlreadyExists, NotFound):
        pass
    allowed = target in TRANSITIONS[state]
    assert state_of(engine) == (target if allowed else state)


def test_ready_models_are_what_is_served(engine: Engine) -> None:
    reach(engine, "ready")
    begin(engine, "other")
    with reading(engine) as session:
        (model,) = catalog.ready_models(session)
        assert catalog.packs_in_use(session) == {"rev1"}
        assert [model.name for model in catalog.list_models(session)] == ["other", "tiny"]
    assert (model.name, model.revision, model.max_context) == ("tiny", "rev1", 512)
    assert model.ready_at == NOW


def test_what_an_encoder_answers_with_is_kept(engine: Engine) -> None:
    model = begin(engine)
    facts = PackFacts("r", "r", "bert", "float32", 1, 512, 9, "classify", 0, ["no", "yes"], True)
    with writing(engine, "test") as session:
        assert catalog.finish(session, model.registration, facts, now_at=NOW)
    with reading(engine) as session:
        found = catalog.get_model(session, "tiny")
    assert (found.task, found.labels, found.multi_label) == ("classify", ["no", "yes"], True)


def test_progress_beats_without_a_new_version(engine: Engine) -> None:
    model = begin(engine)
    with writing(engine, "test") as session:
        before = current_version(session)
        assert registrations.progress(session, model.registration, "convert", 5, 10, now_at=NOW + 1)
        assert current_version(session) == before
        found = catalog.get_model(session, "tiny")
    assert (found.phase, found.done_bytes, found.total_bytes) == ("convert", 5, 10)
    assert found.heartbeat_at == NOW + 1


def test_an_earlier_registration_has_no_say_any_more(engine: Engine) -> None:
    first = reach(engine, "failed")
    second = begin(engine)
    assert first.id == second.id
    assert first.registration != second.registration
    with writing(engine, "test") as session:
        assert not registrations.progress(session, first.registration, "probe", 1, 1, now_at=NOW)
        assert not registrations.adopt(session, first.registration, "h", 8, now_at=NOW)
        assert not catalog.finish(session, first.registration, FACTS, now_at=NOW)
        assert not catalog.fail(session, first.registration, "x", "y", now_at=NOW)
        assert registrations.adopt(session, second.registration, "h", 8, now_at=NOW)
        assert catalog.finish(session, second.registration, FACTS, now_at=NOW)
    assert state_of(engine) == "ready"


@pytest.mark.parametrize(
    ("alive", "silent_s", "expected"),
    [(True, 0.0, "registering"), (False, 0.0, "failed"), (True, 31.0, "failed")],
)
def test_a_dead_registration_is_interrupted(
    engine: Engine, alive: bool, silent_s: float, expected: str
) -> None:
    begin(engine)
    asked: list[tuple[str, int]] = []

    def is_alive(host: str, pid: int) -> bool:
        asked.append((host, pid))
        return alive

    with writing(engine, "test") as session:
        lost = catalog.fail_interrupted(session, is_alive, now_at=NOW + silent_s)
        found = catalog.get_model(session, "tiny")
    assert found.state == expected
    assert lost == (["tiny"] if expected == "failed" else [])
    assert found.reason_code == ("interrupted" if expected == "failed" else "")
    assert set(asked) <= {("h", 7)}


def test_a_removed_name_can_be_added_again(engine: Engine) -> None:
    reach(engine, "removed")
    with reading(engine) as session:
        assert catalog.list_models(session) == []
        assert [model.state for model in catalog.list_models(session, with_removed=True)] == [
            "removed"
        ]
        with pytest.raises(NotFound):
            catalog.get_model(session, "tiny")
    begin(engine)
    assert state_of(engine) == "registering"


def test_pinning(engine: Engine) -> None:
    reach(engine, "ready")
    with writing(engine, "test") as session:
        assert catalog.set_pinned(session, "tiny", True, now_at=NOW).pinned
        assert not catalog.set_pinned(session, "tiny", False, now_at=NOW).pinned
    with pytest.raises(NotFound), writing(engine, "test") as session:
        catalog.set_pinned(session, "none", True, now_at=NOW)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a" * 129, "ü", "x\n"])
def test_names_that_no_request_could_carry(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidValue):
        begin(engine, name)


def test_names_may_look_like_hub_ids(engine: Engine) -> None:
    assert begin(engine, "Qwen/Qwen3-0.6B:chat").state == "registering"
