"""Revisions: an update takes over when it is ready, a roll-back brings an old one again."""

import dataclasses

import pytest
from sqlalchemy import Engine, inspect, text

from registry import audit
from registry.audit import current_version
from registry.errors import AlreadyExists, IllegalTransition, InvalidValue, NotFound, RegistryError
from registry.models import catalog, registrations, revisions
from registry.models.catalog import NEXT, ModelRecord, PackFacts
from registry.schema import downgrade, upgrade
from registry.session import make_engine, reading, writing

NOW = 7000.0
LABELS = ["no", "yes"]
FACTS = PackFacts("rev1", "rev1", "llama", "float32", 4096, 512, 1000)


def facts(number: int) -> PackFacts:
    name = f"rev{number}"
    return dataclasses.replace(FACTS, revision=name, pack=name, weight_bytes=number, labels=LABELS)


def ready(engine: Engine, name: str = "m") -> None:
    with writing(engine, "test") as session:
        row = catalog.add_model(session, name, "acme/m", now_at=NOW, requested_revision="main")
        registrations.note_commit(session, row.registration, "c1")
        assert revisions.finish(session, row.registration, facts(1), keep=3, now_at=NOW)


def begin(engine: Engine, source: str = "acme/m") -> ModelRecord:
    with writing(engine, "test") as session:
        return revisions.begin_update(session, "m", source, dtype="auto", now_at=NOW + 1)


def update(engine: Engine, number: int, keep: int = 3) -> None:
    row = begin(engine)
    with writing(engine, "test") as session:
        registrations.note_commit(session, row.registration, f"c{number}")
        done = revisions.finish(
            session, row.registration, facts(number), keep=keep, now_at=NOW + number
        )
        assert done


def served(engine: Engine) -> str:
    with reading(engine) as session:
        (model,) = catalog.ready_models(session)
        return model.revision


def known(engine: Engine) -> list[str]:
    with reading(engine) as session:
        return [row.revision for row in revisions.list_revisions(session, "m")]


def roll_back(engine: Engine, to: str = "") -> str:
    with writing(engine, "test") as session:
        return revisions.roll_back(session, "m", to, now_at=NOW + 50).revision


def test_an_update_leaves_the_served_one_alone_until_it_is_ready(engine: Engine) -> None:
    ready(engine)
    row = begin(engine)
    assert row.name == f"m{NEXT}"
    with reading(engine) as session:
        before = current_version(session)
        assert [model.state for model in catalog.list_models(session)] == ["ready", "registering"]
    assert served(engine) == "rev1"
    with writing(engine, "test") as session:
        assert revisions.finish(session, row.registration, facts(2), keep=3, now_at=NOW + 2)
    with reading(engine) as session:
        (model,) = catalog.list_models(session, with_removed=True)
        assert current_version(session) == before + 1
        assert audit.latest(session)[0].action == "model.update"
        assert revisions.packs_in_use(session) == {"rev1", "rev2"}
    assert (model.name, model.revision, model.weight_bytes, model.labels) == (
        "m",
        "rev2",
        2,
        LABELS,
    )
    assert (model.registration, model.ready_at) == (row.registration, NOW + 2)


def test_a_failed_update_changes_nothing_and_says_why(engine: Engine) -> None:
    ready(engine)
    row = begin(engine)
    with pytest.raises(AlreadyExists, match="models cancel m"):
        begin(engine)
    with writing(engine, "test") as session:
        catalog.fail(session, row.registration, "parity", "differs", now_at=NOW)
    assert served(engine) == "rev1"
    with reading(engine) as session:
        failed = catalog.get_model(session, f"m{NEXT}")
    assert (failed.state, failed.reason) == ("failed", "differs")
    update(engine, 2)
    assert served(engine) == "rev2"


def test_back_and_forth(engine: Engine) -> None:
    ready(engine)
    with reading(engine) as session:
        (only,) = revisions.list_revisions(session, "m")
    assert (only.revision, only.current, only.source_commit) == ("rev1", True, "c1")
    with pytest.raises(NotFound, match="no earlier"):
        roll_back(engine)
    update(engine, 2)
    update(engine, 3)
    assert known(engine) == ["rev1", "rev2", "rev3"]
    assert roll_back(engine) == "rev2"
    assert roll_back(engine) == "rev1"
    with pytest.raises(NotFound, match="no earlier"):
        roll_back(engine)
    assert served(engine) == "rev1"
    assert roll_back(engine, "c3") == "rev3"
    assert roll_back(engine, "rev2") == "rev2"
    with pytest.raises(NotFound, match="3 revisions"):
        roll_back(engine, "rev")
    with pytest.raises(NotFound, match="0 revisions"):
        roll_back(engine, "other")
    with reading(engine) as session:
        rows = revisions.list_revisions(session, "m")
        model = catalog.get_model(session, "m")
        assert audit.latest(session)[0].action == "model.rollback"
    assert [row.current for row in rows] == [False, True, False]
    assert (model.source_commit, model.weight_bytes, model.labels) == ("c2", 2, LABELS)


def test_content_that_comes_back_is_the_latest_again(engine: Engine) -> None:
    ready(engine)
    update(engine, 2)
    row = begin(engine)
    with writing(engine, "test") as session:
        registrations.note_commit(session, row.registration, "c9")
        assert revisions.finish(session, row.registration, facts(1), keep=3, now_at=NOW + 9)
        assert catalog.get_model(session, "m").source_commit == "c9"
    assert known(engine) == ["rev2", "rev1"]
    assert roll_back(engine) == "rev2"
    assert roll_back(engine, "c9") == "rev1"


def test_only_so_many_are_remembered_and_never_without_the_current(engine: Engine) -> None:
    ready(engine)
    for number in (2, 3, 4):
        update(engine, number)
    assert known(engine) == ["rev2", "rev3", "rev4"]
    roll_back(engine, "rev2")
    update(engine, 5, keep=1)
    assert known(engine) == ["rev5"]
    with reading(engine) as session:
        assert revisions.packs_in_use(session) == {"rev5"}


def test_the_same_content_again_is_no_new_revision(engine: Engine) -> None:
    ready(engine)
    update(engine, 1)
    update(engine, 2)
    update(engine, 1)
    assert known(engine) == ["rev2", "rev1"]
    assert served(engine) == "rev1"


def test_removal_ends_an_update_and_forgets_the_revisions(engine: Engine) -> None:
    ready(engine)
    update(engine, 2)
    row = begin(engine)
    with writing(engine, "test") as session:
        revisions.remove(session, "m", now_at=NOW)
        assert revisions.packs_in_use(session) == set()
        assert catalog.list_models(session) == []
        assert not revisions.finish(session, row.registration, facts(3), keep=3, now_at=NOW)
    ready(engine)
    assert known(engine) == ["rev1"]


def test_an_update_of_what_is_gone_fails(engine: Engine) -> None:
    ready(engine)
    row = begin(engine)
    with writing(engine, "test") as session:
        catalog.remove(session, "m", now_at=NOW)
        assert not revisions.finish(session, row.registration, facts(2), keep=3, now_at=NOW)
        assert catalog.get_model(session, f"m{NEXT}").reason_code == "no_model"


def test_only_what_is_ready_can_be_updated_or_rolled_back(engine: Engine) -> None:
    with writing(engine, "test") as session:
        catalog.add_model(session, "m", "acme/m", now_at=NOW)
    with pytest.raises(IllegalTransition, match="only a ready one"):
        begin(engine)
    with pytest.raises(RegistryError):
        roll_back(engine)
    with pytest.raises(InvalidValue), writing(engine, "test") as session:
        catalog.add_model(session, "m@other", "/m", now_at=NOW)


def test_the_migration_up_and_down_with_data_in_place(url: str) -> None:
    upgrade(url, "0002")
    columns = (
        "id, name, source, requested_dtype, state, phase, done_bytes, total_bytes, reason_code,"
        " reason, registrar_host, registrar_pid, registration, revision, pack, family, dtype,"
        " weight_bytes, max_context, vocab_size, pinned, weight, created_at"
    )
    values = (
        "'mdl_1', 'm', '/m', 'auto', 'ready', 'done', 0, 0, '', '', '', 0, 'r', 'rev0', 'rev0',"
        " 'llama', 'float32', 1, 2, 3, FALSE, 1, 0"
    )
    engine = make_engine(url)
    with writing(engine, "test") as session:
        session.execute(text(f"INSERT INTO models ({columns}) VALUES ({values})"))
    upgrade(url)
    assert known(engine) == ["rev0"]
    update(engine, 2)
    assert known(engine) == ["rev0", "rev2"]
    begin(engine)
    engine.dispose()
    downgrade(url, "0002")
    assert "model_revisions" not in inspect(engine).get_table_names()
    with reading(engine) as session:
        rows = session.execute(text("SELECT name, revision FROM models")).all()
    assert [tuple(row) for row in rows] == [("m", "rev2")]
    upgrade(url)
    assert known(engine) == ["rev2"]
    engine.dispose()
