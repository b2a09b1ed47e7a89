"""The first page: how the server does, what lies in its memory, who waits, who had to go and why.

All of it is worked out once for everybody who looks (overview_board.py).
"""

from collections.abc import Mapping

from admin.ask import Ask, PageRoute, Reply, StreamRoute
from gateway.service import traffic as verbs


def show_overview(ask: Ask) -> Reply:
    """The page."""
    verbs.may_watch(ask.control)
    board, loop = ask.desk.board, ask.incoming.loop
    return ask.page("overview.html", found=board.look(loop), parts_html=board.parts(loop))


def live_overview(ask: Ask) -> Mapping[str, str]:
    """All of it."""
    verbs.may_watch(ask.control)
    return ask.desk.board.parts(ask.incoming.loop)


ROUTES = (PageRoute("GET", "/overview", show_overview),)
STREAMS = (StreamRoute("/live/overview", live_overview, every_s=1.0),)
