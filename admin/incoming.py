"""A request as it comes to the pages: its body read and bounded, its form.

What is asked of a form before anything is done with it (where it came from, its token) is
errors.py's and csrf.py's.
"""

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import Request

from admin import errors
from admin.ask import Incoming

MAX_FIELDS = 500
MAX_FORM_BYTES = 1 << 20


async def read(request: Request, with_body: bool) -> Incoming | None:
    """None where the body is larger than any form."""
    body = b""
    if with_body:
        async for part in request.stream():
            body += part
            if len(body) > MAX_FORM_BYTES:
                return None
    return Incoming(
        method=request.method,
        path=request.scope["path"],
        query_string=request.scope["query_string"].decode("latin-1"),
        headers=dict(request.headers.items()),
        cookies=request.cookies,
        address=request.client.host if request.client else "",
        is_https=request.scope["scheme"] == "https",
        http_id=request.scope.get("state", {}).get("http_id", ""),
        params=request.path_params,
        loop=asyncio.get_running_loop(),
        body=body,
    )


def form_of(incoming: Incoming) -> dict[str, list[str]]:
    """All values of each field, of an ordinary form. Raises Refused."""
    media = incoming.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-www-form-urlencoded":
        raise errors.Refused(415, "This is no form", "Send it as an ordinary form does.")
    found: dict[str, list[str]] = {}
    try:
        text = incoming.body.decode()
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
        if any("\0" in value for _, value in pairs):
            raise ValueError("NUL is no text")
    except ValueError as error:  # not UTF-8, too many fields, or not to be stored
        raise errors.Refused(400, "This is no form", "It cannot be read.") from error
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found
