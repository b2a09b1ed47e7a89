"""How this server is configured: every setting, where it came from, no secrets. Read-only."""

from admin.ask import Ask, PageRoute, Reply
from gateway.service import settings_view

MAX_SEARCH_LEN = 128


def show(ask: Ask) -> Reply:
    """Those that were set first; `q` in the address: a part of a name or of what it does."""
    text = ask.query.get("q", "")[:MAX_SEARCH_LEN]
    found = settings_view.settings_view(ask.control, text)
    num_set = sum(one.is_set for one in found)
    return ask.page("settings.html", found=found, num_set=num_set, text=text)


ROUTES = (PageRoute("GET", "/settings", show),)
