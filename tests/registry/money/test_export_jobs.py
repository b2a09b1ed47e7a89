"""Exports that were asked for: states, whose they are, and what a dead process leaves behind."""

import pytest
from sqlalchemy import Engine

from registry.errors import AlreadyExists, IllegalTransition, NotFound
from registry.money import export_jobs
from registry.money.export_jobs import ExportJob, Progress
from registry.session import appending, reading, writing

NOW = 1000.0
KEEP_S = 100.0


def ask(engine: Engine, job_id: str, now_at: float = NOW) -> ExportJob:
    with writing(engine, "admin:ann") as session:
        return export_jobs.ask(
            session,
            job_id,
            "csv",
            {"version": 1},
            tenant_id="ten_1",
            tenant_name="acme",
            file_name="usage.csv",
            asked_by="admin:ann",
            total_rows=10,
            now_at=now_at,
        )


def claim(engine: Engine, max_running: int = 2, host: str = "here") -> ExportJob | None:
    with writing(engine, "exporter") as session:
        return export_jobs.claim(session, max_running, host, 77, now_at=NOW + 1)


def get(engine: Engine, job_id: str) -> ExportJob:
    with reading(engine) as session:
        return export_jobs.get(session, job_id)


def test_the_longest_waiting_is_first_and_so_many_run_as_may(engine: Engine) -> None:
    for number in range(3):
        ask(engine, f"exp_{number}", NOW - number)
    taken = [claim(engine) for _ in range(3)]
    assert [one.id if one else "" for one in taken] == ["exp_2", "exp_1", ""]
    other = claim(engine, host="elsewhere")
    assert other is not None
    assert other.id == "exp_0"
    with pytest.raises(AlreadyExists):
        ask(engine, "exp_1")


def test_progress_and_the_end_are_the_attempts_own(engine: Engine) -> None:
    ask(engine, "exp_1")
    job = claim(engine)
    assert job is not None
    half = Progress(5, 50, 7, 0.5, 0.1)
    with appending(engine, "exporter") as session:
        assert export_jobs.progress(session, job.attempt, half, now_at=NOW + 2)
        assert not export_jobs.progress(session, "another", half, now_at=NOW + 2)
    assert get(engine, "exp_1").left_s == pytest.approx(5.0)
    with appending(engine, "exporter") as session:
        whole = Progress(10, 100, 14, 1.0)
        assert export_jobs.finish(
            session, job.attempt, whole, "a" * 64, keep_s=KEEP_S, now_at=NOW + 3
        )
        assert not export_jobs.fail(session, job.attempt, "x", "x", keep_s=0.0, now_at=NOW + 3)
    done = get(engine, "exp_1")
    assert (done.state, done.num_rows, done.cost_nanos, done.left_s) == ("done", 10, 14, None)
    for wrong in (export_jobs.cancel, export_jobs.retry):
        with pytest.raises(IllegalTransition), writing(engine, "t") as session:
            wrong(session, "exp_1", now_at=NOW)
    with appending(engine, "t") as session:
        assert export_jobs.remove_expired(session, now_at=NOW + 3 + KEEP_S - 1) == 0
        assert export_jobs.remove_expired(session, now_at=NOW + 3 + KEEP_S) == 1
    with pytest.raises(NotFound):
        get(engine, "exp_1")


@pytest.mark.parametrize(
    ("alive", "silent_s", "lost"), [(True, 1, 0), (False, 1, 1), (True, 99, 1)]
)
def test_a_dead_process_is_told_and_its_job_goes_on_where_its_part_is(
    engine: Engine, alive: bool, silent_s: float, lost: int
) -> None:
    ask(engine, "exp_1")
    assert claim(engine) is not None
    with writing(engine, "t") as session:
        found = export_jobs.fail_interrupted(
            session, lambda host, pid: alive, keep_s=KEEP_S, now_at=NOW + 1 + silent_s
        )
    assert len(found) == lost
    if not lost:
        return
    assert get(engine, "exp_1").reason_code == export_jobs.INTERRUPTED
    with writing(engine, "t") as session:
        export_jobs.retry(session, "exp_1", now_at=NOW)
    assert claim(engine, host="elsewhere") is None, "its part is not there"
    assert claim(engine) is not None


def test_a_cancelled_one_answers_no_more_and_counts_no_more(engine: Engine) -> None:
    ask(engine, "exp_1")
    job = claim(engine)
    assert job is not None
    with writing(engine, "t") as session:
        export_jobs.cancel(session, "exp_1", now_at=NOW)
        assert export_jobs.num_jobs(session, "admin:ann") == 0
    with pytest.raises(IllegalTransition), writing(engine, "t") as session:
        export_jobs.cancel(session, "exp_1", now_at=NOW)
    with appending(engine, "t") as session:
        assert not export_jobs.progress(session, job.attempt, Progress(), now_at=NOW)
    with writing(engine, "t") as session:
        export_jobs.remove(session, "exp_1", now_at=NOW)
        assert export_jobs.jobs(session, tenant_ids=["ten_1"]) == []


def test_what_waits_is_looked_after_once(engine: Engine) -> None:
    ask(engine, "exp_1")
    with appending(engine, "t") as session:
        told = [
            export_jobs.nudge(session, before, "here", now_at=NOW + 20) for before in (NOW, NOW + 5)
        ]
        assert told == [False, True]
        assert not export_jobs.nudge(session, NOW + 5, "here", now_at=NOW + 21)
