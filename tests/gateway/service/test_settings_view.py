"""How a server is configured, as its operators may see it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config import SECRETS, load_settings, sources_of
from gateway.service.control import Control, open_control
from gateway.service.settings_view import SettingView, is_secret, settings_view
from gateway.settings import Settings, settings_reference
from registry.errors import Forbidden
from registry.session import upgrade

SECRET = "s3cret-that-nobody-may-see"


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    given: dict[str, Any] = dict.fromkeys(SECRETS, SECRET) | {"database_url": "", "port": 8123}
    settings = Settings(data_dir=str(tmp_path), **given)
    upgrade(settings.registry_url)
    with open_control(settings, "tests") as found:
        yield found


def named(found: list[SettingView]) -> dict[str, SettingView]:
    return {one.name: one for one in found}


def test_every_setting_stands_there_and_no_secret(control: Control) -> None:
    found = named(settings_view(control))
    assert found.keys() == {row.name for row in settings_reference()}
    assert SECRET not in repr(found)
    assert (found["hub_token"].value, found["hub_token"].is_set) == ("set", True)
    assert found["database_url"].value == "not set"
    assert (found["port"].value, found["port"].default) == ("8123", "8000")
    assert next(iter(found.values())).is_set


def test_addresses_with_a_password_are_secrets() -> None:
    assert is_secret("oidc_redirect_url", "https://user:pass@x.example/")
    assert is_secret("redis_url", "redis://localhost")
    assert not is_secret("oidc_redirect_url", "https://x.example/admin/oidc/callback")
    assert not is_secret("tls_key_file", "/etc/key.pem")
    assert is_secret("some_new_token", "x"), "whatever comes to be called so"
    assert not is_secret("default_max_tokens", 3)
    texts = [row.name for row in settings_reference() if isinstance(row.default, str)]
    assert {name for name in texts if is_secret(name, "x@y")} >= set(SECRETS)


def test_where_values_came_from(tmp_path: Path) -> None:
    file = tmp_path / "polyhost.toml"
    environ = {"POLYHOST_PORT": "8002", "POLYHOST_KEY_CACHE_POLL_S": "0.25"}
    file.write_text('port = 8001\nhost = "127.0.0.2"\n')
    settings = load_settings(file, {"demo": True}, environ)
    assert sources_of(settings, environ, file) == {
        "port": "POLYHOST_PORT",
        "host": str(file),
        "key_cache_poll_s": "POLYHOST_KEY_CACHE_POLL_S",
        "demo": "the command line, or the file of --config",
    }
    file.write_text("port = ")
    assert sources_of(settings, environ, file)["host"].startswith("the command line")


def test_searching_and_rights(control: Control) -> None:
    assert named(settings_view(control, " OIDC_ISS ")).keys() == {"oidc_issuer"}
    assert settings_view(control, "no such setting at all") == []
    for role in ("viewer", ""):
        with pytest.raises(Forbidden):
            settings_view(replace(control, grants={"": role}))
    with pytest.raises(Forbidden):
        settings_view(replace(control, grants={"ten_1": "owner"}))
