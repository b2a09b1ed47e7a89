"""The verbs on the ledger itself: roll-ups, what is kept, corrections (control.py)."""

from gateway.service.control import Control, require
from registry import corrections, invoices, ledger, retention, rollups
from registry.corrections import Right
from registry.errors import RegistryError
from registry.ledger import Posting
from registry.rollups import LedgerState
from registry.session import appending


def catch_up(control: Control) -> int:
    """Bring the roll-ups up to what is posted now. Returns how many postings were added."""
    require(control, "usage.write")
    with appending(control.engine, control.actor) as session:
        upto = rollups.newest_seq(session)
    total = 0
    while True:
        with appending(control.engine, control.actor) as session:
            num = rollups.roll(session, upto)
        total += num
        if not num:
            return total


def rebuild_rollups(control: Control) -> int:
    """Sum anew all that is kept. Returns the postings summed."""
    require(control, "usage.write")
    catch_up(control)
    with appending(control.engine, control.actor) as session:
        return rollups.rebuild(session)


def check_ledger(control: Control) -> LedgerState:
    """Raises RegistryError where a request is both open and posted, or sums are wrong."""
    require(control, "usage.read")
    with control.reading() as session:
        ledger.check_integrity(session)
        rollups.check_integrity(session)
        return rollups.state(session)


def keep_usage_from(control: Control, day_at: float) -> int:
    """Delete the postings before that day, slice by slice; the roll-ups stay. Returns how many.

    Raises RegistryError where they are still to be kept: where invoices are issued, until all that
    cost something is on one.
    """
    require(control, "usage.write")
    catch_up(control)
    with control.writing() as session:
        kept_from = rollups.state(session).kept_from
        if owing := invoices.not_billed(session, kept_from, day_at):
            more = "" if len(owing) == 1 else f" and {len(owing) - 1} more"
            raise RegistryError(
                f"{owing[0]!r}{more} have postings before that day that are on no invoice yet: "
                "see `polyhost invoices create`"
            )
        retention.keep_from(session, day_at, now_at=control.clock())
    total = 0
    while True:
        with appending(control.engine, control.actor) as session:
            num = retention.delete(session)
        total += num
        if not num:
            return total


def correct_usage(control: Control, request_id: str, right: Right) -> Posting:
    """A posting that puts another one right."""
    require(control, "usage.write")
    with control.writing() as session:
        return corrections.correct(session, request_id, right, now_at=control.clock())
