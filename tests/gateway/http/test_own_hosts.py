"""By which names browsers may reach the pages."""

from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from gateway.http.own_hosts import MISDIRECTED, OwnHosts, exposure
from gateway.settings.settings import Settings

REBOUND = "evil.example"
OIDC: dict[str, Any] = {
    "oidc_issuer": "https://id.example",
    "oidc_client_id": "polyhost",
    "oidc_client_secret": "secret",
    "oidc_redirect_url": "https://pages.example/admin/oidc/callback",
}


async def status(named: str, /, **settings: Any) -> int:
    told: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    app = OwnHosts(PlainTextResponse("in"), Settings(**settings))
    headers = [(b"host", named.encode("latin-1"))] if named else []
    await app({"type": "http", "method": "GET", "headers": headers}, receive, send)
    return told[0]


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "[::1]:8000", "192.0.2.7", "localhost", "LOCALHOST:8000", "localhost."),
        "polyhost.localhost:8000",
    ],
)
async def test_addresses_and_this_machine_always_work(host: str) -> None:
    assert await status(host) == 200
    assert await status(host, allowed_hosts="pages.example") == 200


@pytest.mark.parametrize(
    "host", [REBOUND, f"{REBOUND}:8000", "", "127.0.0.1.evil.example", "xlocalhost", "\xe9.example"]
)
async def test_other_names_do_not_reach_a_server_on_loopback(host: str) -> None:
    assert await status(host) == MISDIRECTED
    assert await status(host, host="::1") == MISDIRECTED
    assert await status(host, host="localhost") == MISDIRECTED


async def test_any_name_works_where_others_reach_the_server_and_none_is_set() -> None:
    for settings in ({"host": "0.0.0.0"}, {"host": "box"}, {"trusted_proxies": "127.0.0.1"}):
        assert await status("machine:8000", **settings) == 200
        assert await status(REBOUND, **settings, allowed_hosts="machine") == MISDIRECTED
    assert await status(REBOUND, allowed_hosts="*") == 200


async def test_names_that_are_set() -> None:
    set_ = {"host": "0.0.0.0", "allowed_hosts": "Pages.example, *.corp.example"}
    for host in ("pages.example", "PAGES.example:443", "a.corp.example", "b.a.corp.example:80"):
        assert await status(host, **set_) == 200
    for host in ("corp.example", "x.pages.example", "pages.example.evil.example", "xcorp.example"):
        assert await status(host, **set_) == MISDIRECTED
    assert await status("pages.example", **OIDC) == 200
    assert await status(REBOUND, **OIDC) == MISDIRECTED


def test_what_an_operator_is_told_at_the_start() -> None:
    assert exposure(Settings(metrics_token="*")) == []
    both = exposure(Settings(host="0.0.0.0", metrics_token="*"))
    assert [word for word in ("metrics_token", "allowed_hosts") if word not in " ".join(both)] == []
    assert exposure(Settings(host="::", allowed_hosts="pages.example")) == []
