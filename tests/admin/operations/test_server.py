"""How a server is configured, as its operators may see it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from admin.context.operator_context import OperatorContext, open_context
from admin.operations.server import SettingView, is_secret, settings_view
from gateway.settings.config import SECRETS, load_settings, sources_of
from gateway.settings.settings import Settings, settings_reference
from registry.errors import Forbidden
from tests.migrated import migrated

SECRET = "s3cret-that-nobody-may-see"


@pytest.fixture
def context(tmp_path: Path) -> Iterator[OperatorContext]:
    given: dict[str, Any] = dict.fromkeys(SECRETS, SECRET) | {"database_url": "", "port": 8123}
    settings = Settings(data_dir=str(tmp_path), **given)
    migrated(settings.registry_url)
    with open_context(settings, "tests") as found:
        yield found


def named(found: list[SettingView]) -> dict[str, SettingView]:
    return {one.name: one for one in found}


def test_every_setting_stands_there_and_no_secret(context: OperatorContext) -> None:
    found = named(settings_view(context))
    assert found.keys() == {row.name for row in settings_reference()}
    assert SECRET not in repr(found)
    assert (found["hub_token"].value, found["hub_token"].is_set) == ("set", True)
    assert found["database_url"].value == "not set"
    assert (found["port"].value, found["port"].default) == ("8123", "8000")
    assert next(iter(found.values())).is_set


def test_addresses_with_a_password_are_secrets() -> None:
    assert is_secret("oidc_redirect_url", "https://user:pass@x.example/")
    assert is_secret("redis_url", "redis://localhost")
    assert is_secret("hub_endpoint", "http://u:sekrethub@127.0.0.1:1")
    assert is_secret("hub_endpoint", "https://mirror.example/?token=sekret")
    assert is_secret("cors_origins", "https://a.example,https://u:p@b.example")
    assert not is_secret("hub_endpoint", "https://mirror.example/hf")
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


def test_searching_and_rights(context: OperatorContext) -> None:
    assert named(settings_view(context, " OIDC_ISS ")).keys() == {"oidc_issuer"}
    assert settings_view(context, "no such setting at all") == []
    for role in ("viewer", ""):
        with pytest.raises(Forbidden):
            settings_view(replace(context, grants={"": role}))
    with pytest.raises(Forbidden):
        settings_view(replace(context, grants={"ten_1": "owner"}))
