"""An invoice as one page of HTML: no script, nothing fetched, made to be printed."""

from pathlib import Path

import jinja2

from gateway.billing.invoice import Document, line_places, money, percent

TEMPLATE_PATH = Path(__file__).with_name("invoice.html")


def render(document: Document, digest: str) -> bytes:
    """The page; all that comes from people is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))
    page = template.render(
        invoice=document,
        digest=digest,
        money=money,
        percent=percent,
        places=line_places(document),
    )
    return page.encode()
