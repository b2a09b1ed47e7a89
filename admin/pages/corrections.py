"""Corrections of usage: a posting that puts a request's amounts right. Postings never change."""

from starlette.responses import Response

from admin.context.operator_context import require
from admin.context.optimistic_lock import ChangedMeanwhile
from admin.operations import usage as verbs
from admin.operations.usage import Standing
from admin.web.forms import Field, Form, nanos_of, text_of
from admin.web.request import PageRequest, PageRoute
from registry.errors import NotFound
from registry.money.corrections import Right

AMOUNTS = {
    "prompt_tokens": "Input tokens",
    "cached_tokens": "Cached input tokens",
    "completion_tokens": "Output tokens",
}
SEEN = "seen"


def show(request: PageRequest) -> Response:
    """A search by request id; with `request` in the address that request and the form."""
    require(request.operator, "usage.write")
    wanted = request.query.get("request", "").strip()[:128]
    return _page(request, wanted, _find(request, wanted))


def correct(request: PageRequest) -> Response:
    """Post the difference, if nobody else has corrected the request meanwhile."""
    require(request.operator, "usage.write")
    wanted = request.fields.get("request", "").strip()[:128]
    found = _find(request, wanted)
    if found is None:
        return _page(request, wanted, None, status=404)
    form = _form(request, found, given=True)
    tokens = {name: form.whole(name) for name in AMOUNTS}
    right, seen = Right(nanos_of(form, "cost"), **tokens), form.text(SEEN)
    if form.is_sound and seen != _mark(found.amounts):
        return _page(request, wanted, found, _clash(form, found), 409)
    if form.is_sound:
        try:
            with form.refusals():
                verbs.correct_usage(request.operator, wanted, right, found.amounts)
                done = "The correction was posted. It is on the tenant's next invoice."
                return request.redirect(f"/corrections?request={wanted}", done)
        except ChangedMeanwhile:
            found = verbs.standing(request.operator, wanted)
            return _page(request, wanted, found, _clash(form, found), 409)
    return _page(request, wanted, found, form, 422)


def _find(request: PageRequest, wanted: str) -> Standing | None:
    try:
        return verbs.standing(request.operator, wanted) if wanted else None
    except NotFound:
        return None


def _clash(form: Form, found: Standing) -> Form:
    form.given = {**(form.given or {}), SEEN: _mark(found.amounts)}
    form.trouble = (
        "Another user corrected this request in the meantime. Nothing was saved. The amounts that "
        "hold now are above; send again to replace them with yours."
    )
    return form


def _page(
    request: PageRequest,
    wanted: str,
    found: Standing | None,
    form: Form | None = None,
    status: int = 200,
) -> Response:
    return request.page(
        "corrections.html",
        404 if wanted and found is None else status,
        wanted=wanted,
        found=found,
        form=form or (_form(request, found) if found else None),
        amounts=AMOUNTS,
    )


def _form(request: PageRequest, found: Standing, given: bool = False) -> Form:
    now = found.amounts
    fields = [
        Field(name, label, "number", value=str(getattr(now, name)), required=True)
        for name, label in AMOUNTS.items()
    ]
    currency = request.context.settings.currency
    fields.append(
        Field("cost", "Cost", "number", value=text_of(now.cost_nanos or 0), unit=currency,
              required=True, help="Not recalculated from the tokens.")
    )  # fmt: skip
    fields.append(Field(SEEN, "Seen", value=_mark(now), max_length=128))
    return Form(tuple(fields), request.fields if given else None)


def _mark(now: Right) -> str:
    counts = (now.prompt_tokens, now.cached_tokens, now.completion_tokens)
    return " ".join(str(each) for each in (now.cost_nanos, *counts))


ROUTES = (
    PageRoute("GET", "/corrections", show),
    PageRoute("POST", "/correction/add", correct),
)
