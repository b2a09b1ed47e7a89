"""The list of hosted models: state, where each is, what is asked of it, size, price."""

from collections.abc import Mapping

from admin.ask import Ask, PageRoute, Reply, StreamRoute
from admin.residency import ON_DEVICE, models_in, places
from admin.tables import Column, Filter, TableSpec, TableState, table_state
from gateway.service import model_list as verbs
from registry.model_list import ModelFilter

TABLE = TableSpec(
    columns=(
        Column("Model", "name"),
        Column("State", "state"),
        Column("Requests, 24 h", "requests", "number", "down"),
        Column("Failed", "failed", "number", "down"),
        Column("Weights", "size", "number", "down"),
        Column("Load time", kind="number"),
        Column("Price per 1M in / out", kind="number"),
    ),
    default_sort="-requests",
    filters=(
        Filter(
            "state",
            "State",
            {"ready": "Ready", "registering": "Being registered", "failed": "Failed"},
        ),
        Filter("where", "Where", {"device": "On a device", "warm": "Warm", "cold": "Cold"}),
        Filter(
            "task", "Task", {"generate": "Generates", "embed": "Embeds", "classify": "Classifies"}
        ),
        Filter("pinned", "Pin", {"yes": "Pinned", "no": "Not pinned"}),
    ),
    search="Name or family",
)


def list_models(ask: Ask) -> Reply:
    """The page."""
    table = table_state(TABLE, ask.incoming.path, ask.query)
    page, counts = verbs.models_page(ask.control, _wanted(ask, table), table.sort, table.cut)
    names = [line.name for line in page.rows]
    on_device = models_in(ask.live, ON_DEVICE)
    return ask.page(
        "models.html",
        table=table,
        page=page,
        counts=counts,
        places=places(ask.live, names),
        num_on_device=len(on_device),
        stream="/live/models?" + ask.incoming.query_string,
    )


def live_models(ask: Ask) -> Mapping[str, str]:
    """The state of each row that the page shows."""
    table = table_state(TABLE, "", ask.query)
    page, _ = verbs.models_page(ask.control, _wanted(ask, table), table.sort, table.cut)
    now = places(ask.live, [line.name for line in page.rows])
    return {
        f"state:{line.name}": ask.fragment("models_parts.html", "state", line, now[line.name])
        for line in page.rows
    }


def _wanted(ask: Ask, table: TableState) -> ModelFilter:
    where = table.chosen["where"]
    device, warm = models_in(ask.live, ON_DEVICE), models_in(ask.live, ["warm"])
    names = {"device": device, "warm": warm - device}.get(where)
    pinned = {"yes": True, "no": False}.get(table.chosen["pinned"])
    return ModelFilter(
        text=table.search,
        state="ready" if where and not table.chosen["state"] else table.chosen["state"],
        task=table.chosen["task"],
        pinned=pinned,
        names=names,
        not_names=device | warm if where == "cold" else None,
    )


ROUTES = (PageRoute("GET", "/models", list_models, live=True),)
STREAMS = (StreamRoute("/live/models", live_models, every_s=2.0),)
