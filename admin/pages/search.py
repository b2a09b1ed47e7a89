"""Search over models, tenants, keys and pages: for the palette as JSON, and as a page."""

from collections.abc import Mapping

import msgspec

from admin.ask import PREFIX, Ask, PageRoute, Reply
from admin.templating import may_any, path
from gateway.service import search as verbs

WHERE: Mapping[str, str] = {"model": "/models/", "tenant": "/tenants/", "key": "/keys/"}


class Row(msgspec.Struct, frozen=True):
    """One line of what was found."""

    kind: str
    title: str
    hint: str
    url: str


def as_json(ask: Ask) -> Reply:
    """What the palette asks at each key."""
    body = msgspec.json.encode(_rows(ask))
    return Reply(body, media="application/json")


def as_page(ask: Ask) -> Reply:
    """The same without scripts."""
    text = ask.query.get("q", "")
    return ask.page("search.html", text=text, found=_rows(ask) if text.strip() else [])


def _rows(ask: Ask) -> list[Row]:
    text = ask.query.get("q", "").strip()
    found = [
        Row("Page", item.label, group.label, PREFIX + item.path)
        for group in ask.desk.navigation
        for item in group.items
        if (item.verb is None or may_any(ask.me, item.verb)) and text.lower() in item.label.lower()
    ]
    shown = {item.path + "/" for group in ask.desk.navigation for item in group.items}
    found += [
        Row(thing.kind.capitalize(), thing.name, thing.hint, _url(thing))
        for thing in verbs.search(ask.control, text)
        if WHERE[thing.kind] in shown
    ]
    return found


def _url(thing: verbs.Found) -> str:
    return f"{PREFIX}{WHERE[thing.kind]}{path(thing.ref)}"


ROUTES = (
    PageRoute("GET", "/search", as_page),
    PageRoute("GET", "/search.json", as_json),
)
