"""Sign-ins that failed, by whoever they count against, so that passwords cannot be tried out.

One row a subject: an address, a user's name, both together. Rows are counted up before a password
is looked at, so that trying many at once gains nothing, by any number of gateway processes. How
long one waits after how many is gateway/policy/sign_in_guard.py's. Neither audited nor a change of
the registry's version.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Select, String, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.base import Base, Count, Instant

MAX_SUBJECT_LEN = 400


@dataclass(frozen=True, slots=True)
class Failures:
    """How many there were, and when the last was."""

    num_failed: int = 0
    failed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One failure of each subject, counted ahead at `at`; `before`: what there was until then."""

    subjects: tuple[str, ...]
    before: tuple[Failures, ...]
    at: float


class SignInFailureRow(Base):
    """See Failures."""

    __tablename__ = "sign_in_failures"

    subject: Mapped[str] = mapped_column(String(MAX_SUBJECT_LEN), primary_key=True)
    num_failed: Mapped[Count]
    failed_at: Mapped[Instant]


def failures(session: Session, subjects: Sequence[str]) -> list[Failures]:
    """What is remembered of each."""
    rows = {row.subject: row for row in session.scalars(_of(subjects))}
    return [
        Failures(rows[name].num_failed, rows[name].failed_at) if name in rows else Failures()
        for name in _keys(subjects)
    ]


def count_up(session: Session, subjects: Sequence[str], *, now_at: float, forget_s: float) -> Turn:
    """One more for each. What is older than `forget_s` is forgotten, of all subjects."""
    before = tuple(failures(session, subjects))
    session.execute(delete(SignInFailureRow).where(SignInFailureRow.failed_at <= now_at - forget_s))
    rows = {row.subject: row for row in session.scalars(_of(subjects))}
    for name in _keys(subjects):
        row = rows.get(name)
        if row is None:
            session.add(SignInFailureRow(subject=name, num_failed=1, failed_at=now_at))
        else:
            row.num_failed += 1
            row.failed_at = now_at
    session.flush()
    return Turn(tuple(subjects), before, now_at)


def take_back(session: Session, turn: Turn) -> None:
    """It was no failure. Where it is the last that was counted, the one before it is the last
    again: else all who share an address would wait anew behind each of them who signs in."""
    before = dict(zip(_keys(turn.subjects), turn.before, strict=True))
    for row in session.scalars(_of(turn.subjects)):
        row.num_failed -= 1
        if row.failed_at == turn.at:
            row.failed_at = before[row.subject].failed_at
        if row.num_failed <= 0:
            session.delete(row)
    session.flush()


def forget(session: Session, subject: str) -> None:
    """Nothing is held against this one any more."""
    session.execute(delete(SignInFailureRow).where(SignInFailureRow.subject.in_(_keys([subject]))))


def _keys(subjects: Sequence[str]) -> list[str]:
    return [name[:MAX_SUBJECT_LEN] for name in subjects]


def _of(subjects: Sequence[str]) -> Select[SignInFailureRow]:
    return select(SignInFailureRow).where(SignInFailureRow.subject.in_(_keys(subjects)))
