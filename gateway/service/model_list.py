"""The verbs that show hosted models, page by page: for the operator's pages (control.py).

Beside service/models.py, whose lists hold the whole catalog. What a model's registration has come
to is put right on the way here too: one whose process died is failed.
"""

from collections.abc import Collection
from dataclasses import dataclass

from gateway.service.control import Control, process_is_alive, require
from gateway.service.models import list_models
from registry import catalog, model_list, prices, registrations, revisions
from registry.catalog import HEARTBEAT_TIMEOUT_S, NEXT, ModelRecord
from registry.model_list import Hour, ModelCounts, ModelFilter, ModelLine
from registry.paging import Cut, Listed
from registry.prices import PriceRecord
from registry.registrations import Registration, RegistrationFilter
from registry.revisions import RevisionRecord

RECENT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ModelView:
    """All that is known of one model. `job`: a registration of it that has not ended well: its
    own, or of a new revision."""

    model: ModelRecord
    job: ModelRecord | None
    price: PriceRecord | None
    revisions: list[RevisionRecord]


def models_page(
    control: Control, wanted: ModelFilter, sort: str, cut: Cut
) -> tuple[Listed[ModelLine], ModelCounts]:
    """A page of the catalog, and how many there are in all."""
    require(control, "models.read")
    _fail_lost(control)
    now_at = control.clock()
    with control.reading() as session:
        page = model_list.page(
            session, wanted, sort, cut, since_at=now_at - RECENT_S, now_at=now_at
        )
        return page, model_list.counts(session)


def model_view(control: Control, name: str) -> ModelView:
    """One model. Raises NotFound."""
    require(control, "models.read")
    _fail_lost(control)
    name = name.removesuffix(NEXT)
    with control.reading() as session:
        model = catalog.get_model(session, name)
        job = model if model.state in ("registering", "failed") else None
        update = catalog.find_model(session, name + NEXT)
        if update is not None and update.state in ("registering", "failed"):
            job = update
        price = prices.prices_of(session, [name], control.clock()).get(name)
        return ModelView(model, job, price, revisions.list_revisions(session, name))


def registrations_page(
    control: Control, wanted: RegistrationFilter, sort: str, cut: Cut
) -> tuple[Listed[Registration], Listed[Registration], dict[str, int]]:
    """A page of all registrations; those that go on, the newest first; how many by state."""
    require(control, "models.read")
    _fail_lost(control)
    running = RegistrationFilter(state="registering")
    with control.reading() as session:
        return (
            registrations.page(session, wanted, sort, cut),
            registrations.page(session, running, "since", Cut(descending=True)),
            model_list.counts(session).by_state,
        )


def model_traffic(control: Control, name: str, hours: int = 24) -> list[Hour]:
    """The last hours of a model, the present one included."""
    require(control, "models.read")
    now_at = control.clock()
    with control.reading() as session:
        return model_list.hours(session, name, now_at - (hours - 1) * 3600.0, now_at)


def pinned(control: Control, names: Collection[str]) -> set[str]:
    """Which of these models are."""
    require(control, "models.read")
    with control.reading() as session:
        return model_list.pinned(session, names)


def ask_rates(control: Control, names: Collection[str]) -> dict[str, float]:
    """How often each was asked for lately, in asks a second."""
    require(control, "models.read")
    now_at = control.clock()
    with control.reading() as session:
        found = model_list.requests(session, names, now_at - RECENT_S)
    return {name: num / RECENT_S for name, num in found.items()}


def _fail_lost(control: Control) -> None:
    """Registrations whose process is gone become failed, and are cleaned up after."""
    now_at = control.clock()
    with control.reading() as session:
        running = model_list.registering(session)
    if any(
        now_at - (model.heartbeat_at or 0.0) > HEARTBEAT_TIMEOUT_S
        or not process_is_alive(model.registrar_host, model.registrar_pid)
        for model in running
    ):
        list_models(control)
