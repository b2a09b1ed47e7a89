"""The verb on the registry's own health, for the operator's pages (control.py)."""

import time
from dataclasses import dataclass

from gateway.service.control import Control, require
from registry import rollups, schema


@dataclass(frozen=True, slots=True)
class DatabaseHealth:
    """`answer_s`: how long a small question took. `num_behind`: postings not in the roll-ups."""

    backend: str
    schema: str
    answer_s: float
    num_behind: int


def database_health(control: Control) -> DatabaseHealth:
    """Asks it something. Raises what a database that does not answer raises."""
    require(control, "models.read")
    with control.reading() as session:
        began_s = time.monotonic()
        revision = schema.revision(session.connection()) or "none"
        answer_s = time.monotonic() - began_s
        behind = rollups.state(session).num_behind
    return DatabaseHealth(control.engine.dialect.name, revision, answer_s, behind)
