"""Settings of several servers: what they need of each other is there, or the start says what is
not."""

from pathlib import Path

import pytest

from gateway.settings.cluster_settings import split_address
from gateway.settings.config import SettingsError, load_settings
from gateway.settings.settings import Settings

WORKER = """
[[workers]]
name = "far-0"
endpoint = "tcp://10.0.0.5:7600"
public_key = "QFA(cB70ocx6k0O-mP%/}@b<RGK#i>p[:pVG:L4-"
"""
HEAD = """
database_url = "postgresql://u@db/polyhost"
dispatcher_address = "10.0.0.1:7500"
dispatcher_peers = ["10.0.0.2:7500", "[fd00::3]:7500"]
cluster_key_file = "~/key.pem"
"""


def load(folder: Path, text: str) -> Settings:
    path = folder / "polyhost.toml"
    path.write_text(text)
    return load_settings(path, {"data_dir": str(folder)}, {})


def test_two_servers_as_the_documentation_has_them(tmp_path: Path) -> None:
    settings = load(tmp_path, HEAD + WORKER)
    assert settings.is_clustered
    assert [split_address(peer) for peer in settings.dispatcher_peers] == [
        ("10.0.0.2", 7500),
        ("fd00::3", 7500),
    ]
    files = settings.tls_files(settings.data_path)
    assert files.cert == tmp_path / "cluster" / "cert.pem"
    assert files.key == Path("~/key.pem").expanduser()
    assert not Settings().is_clustered


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD, "list each one as"),
        (HEAD + WORKER.replace('name = "far-0"', ""), "list each one as"),
        (HEAD + WORKER + '[[workers]]\nname = "near"\n', "list each one as"),
        (HEAD.replace("postgresql", "sqlite") + WORKER, "PostgreSQL"),
        (HEAD.replace('dispatcher_address = "10.0.0.1:7500"', "") + WORKER, "set both"),
        (HEAD.replace("0.1:7500", "0.1:75000") + WORKER, "between 1 and 65535"),
        (HEAD.replace("0.2:7500", "0.2:0") + WORKER, "between 1 and 65535"),
        (HEAD.replace("10.0.0.1:7500", "0.0.0.0:7500") + WORKER, "every address"),
        (HEAD.replace("10.0.0.1:7500", "[::]:7500") + WORKER, "every address"),
        (HEAD.replace("10.0.0.1:7500", "fd00::1:7500") + WORKER, "in brackets"),
        (HEAD.replace("10.0.0.2:7500", "10.0.0.1:7500") + WORKER, "only the other servers"),
        (HEAD.replace("10.0.0.1:7500", "10.0.0.1") + WORKER, "dispatcher_address"),
    ],
)
def test_what_other_servers_could_not_reach_ends_the_start(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(SettingsError, match=told):
        load(tmp_path, text)
