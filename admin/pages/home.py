"""The first page: the first of the navigation that its user may see."""

from admin.ask import Ask, PageRoute, Reply
from admin.templating import may_any


def home(ask: Ask) -> Reply:
    """Sends everybody to where there is something to see."""
    items = [item for group in ask.desk.navigation for item in group.items]
    seen = [item for item in items if item.verb is None or may_any(ask.me, item.verb)]
    return ask.redirect(seen[0].path if seen else "/account")


ROUTES = (PageRoute("GET", "/", home),)
