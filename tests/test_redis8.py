"""Getting a Redis with vector sets for tests: nothing is taken for it that is not it."""

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import redis8


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(redis8.EXTERNAL, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(redis8, "KEYRING", __file__)
    return tmp_path


def apt(package: bytes) -> Callable[[list[str]], str]:
    """Downloads that package for the server's."""

    def run(command: list[str]) -> str:
        if "indextargets" in command:
            return "http://mirror.invalid/debian/\n"
        if "install" in command:
            (state,) = [word for word in command if word.startswith("Dir::Cache=")]
            archives = Path(state.partition("=")[2]) / "archives"
            (archives / "redis-tools_8_amd64.deb").write_bytes(package)
            assert command[-1] == f"redis-tools={redis8.VERSION}"
        return ""

    return run


def test_where_there_is_none_it_is_said_how_to_get_it() -> None:
    with pytest.raises(redis8.Missing, match=r"python tests/redis8\.py"):
        redis8.command()


def test_a_server_of_ones_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(redis8.EXTERNAL, "/opt/redis-server")
    assert redis8.command() == ["/opt/redis-server"]
    redis8.fetch()


def test_another_package_than_the_known_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(redis8, "_run", apt(b"something else"))
    assert redis8.main() == 1
    assert "is not the one whose hash is known" in capsys.readouterr().err
    assert not redis8.folder().exists()


def test_without_apt_or_for_another_machine_it_is_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(redis8.Missing, match="riscv64"):
        redis8.fetch()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(redis8.Missing, match="no apt-get"):
        redis8.fetch()


def test_a_package_manager_that_fails_is_told_in_one_line() -> None:
    with pytest.raises(redis8.Missing, match=r"^false"):
        redis8._run(["false"])
    with pytest.raises(redis8.Missing, match="not-a-program"):
        redis8._run(["not-a-program"])
