"""All registrations: those that go on, with speed and time left; failed ones; those done."""

import hashlib
from collections.abc import Mapping

from admin.ask import Ask, PageRoute, Reply, StreamRoute
from admin.tables import Column, Filter, TableSpec, TableState, table_state
from gateway.service import model_list as verbs
from registry.paging import Listed
from registry.registrations import Registration, RegistrationFilter

TABLE = TableSpec(
    columns=(
        Column("Model", "name"),
        Column("Source"),
        Column("State"),
        Column("Since", "since", first="down"),
        Column("Actions", kind="action"),
    ),
    default_sort="-since",
    filters=(
        Filter("state", "State", {"registering": "Going on", "failed": "Failed", "ready": "Done"}),
    ),
    search="Name or source",
)


def show(ask: Ask) -> Reply:
    """The page. Those that go on are above, whatever the list below is asked."""
    table = table_state(TABLE, ask.incoming.path, ask.query)
    found, running, counts = _found(ask, table)
    return ask.page(
        "registrations.html",
        table=table,
        page=found,
        running=running,
        counts=counts,
        shape=_shape(found, running),
        stream="/live/registrations?" + ask.incoming.query_string,
    )


def live(ask: Ask) -> Mapping[str, str]:
    """How far each is; where another button would be right the page loads anew."""
    table = table_state(TABLE, "", ask.query)
    found, running, _ = _found(ask, table)
    parts = {
        f"job:{each.name}": ask.fragment("registrations_parts.html", "work", each, ask.now_at)
        for each in running.rows
    }
    shape = _shape(found, running)
    if ask.query.get("shape", shape) != shape:
        parts["@reload"] = shape
    return parts


def _found(
    ask: Ask, table: TableState
) -> tuple[Listed[Registration], Listed[Registration], Mapping[str, int]]:
    wanted = RegistrationFilter(table.search, table.chosen["state"])
    return verbs.registrations_page(ask.control, wanted, table.sort, table.cut)


def _shape(*lists: Listed[Registration]) -> str:
    """What the page's rows and buttons depend on."""
    told = " ".join(f"{each.name}:{each.state}" for found in lists for each in found.rows)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


ROUTES = (PageRoute("GET", "/registrations", show),)
STREAMS = (StreamRoute("/live/registrations", live),)
