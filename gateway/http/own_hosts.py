"""The host names that this server answers to, against DNS rebinding: a web page whose name comes to
resolve to this machine is, to the browser, of this origin, and could send forms to the pages here.

    an IP address, localhost, *.localhost    always: no web page of others has such a name
    the setting `allowed_hosts`              what it names; `*` is any
    oidc_redirect_url                        its host
    `allowed_hosts` empty                    any name, unless the server listens on loopback alone
                                             and trusts no proxy: then browsers have no other name

Only what browsers sign in to is guarded; the API needs a key that no web page has.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.settings.http_settings import OPEN
from gateway.settings.settings import Settings

MISDIRECTED = 421
LOCALHOST = "localhost"


class OwnHosts:
    """An application for requests whose Host is this server's own; others get 421."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        names = {name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip()}
        if not names and (settings.trusted_proxies or not listens_on_loopback(settings)):
            names = {OPEN}
        redirect = urlsplit(settings.oidc_redirect_url).hostname
        self._is_any = OPEN in names
        self._names = frozenset({LOCALHOST, *names, *([redirect] if redirect else ())})
        self._ends = (
            f".{LOCALHOST}",
            *(name.removeprefix("*") for name in names if name.startswith("*.")),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        name = _name_of(host.decode("latin-1"))
        if self._is_any or self._is_own(name):
            await self._app(scope, receive, send)
            return
        text = (
            f"This server is not known as {name!r}: add the name to the setting allowed_hosts "
            "(POLYHOST_ALLOWED_HOSTS) and restart the server.\n"
        )
        await PlainTextResponse(text, MISDIRECTED)(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        return name in self._names or name.endswith(self._ends) or _is_address(name)


def listens_on_loopback(settings: Settings) -> bool:
    """Whether only this machine reaches the server."""
    return settings.host == LOCALHOST or is_loopback(settings.host)


def is_loopback(name: str) -> bool:
    """Whether it is an address of this machine for itself."""
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def exposure(settings: Settings) -> list[str]:
    """What an operator should know about a server that others reach, for the log at its start."""
    found = list[str]()
    if listens_on_loopback(settings):
        return found
    if settings.metrics_token == OPEN:
        found.append("/metrics is open to everybody who reaches this server: set metrics_token")
    if settings.ollama_key_id:
        found.append(
            "Ollama's routes are open to everybody who reaches this server, in the name of the key "
            f"{settings.ollama_key_id}: give it limits and networks"
        )
    if not settings.allowed_hosts:
        found.append(
            "the operator's pages answer to any host name: set allowed_hosts to the names that "
            "browsers use"
        )
    return found


def _name_of(host: str) -> str:
    """Of a Host header, without the port and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
