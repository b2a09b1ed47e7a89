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


def apt(asked: list[str], present: str) -> Callable[[list[str]], str]:
    """Has the package in one archive; unpacks a loader and nothing else."""

    def run(command: list[str]) -> str:
        if "indextargets" in command:
            return "http://mirror.invalid/debian/\n"
        if command[0] == "dpkg-deb":
            libraries = Path(command[-1]) / "usr" / "lib" / "x86_64-linux-gnu"
            libraries.mkdir(parents=True)
            (libraries / "ld-linux-x86-64.so.2").touch()
        if "install" in command:
            (state,) = [word for word in command if word.startswith("Dir::Cache=")]
            work = Path(state.partition("=")[2])
            sources = (work / "trixie.sources").read_text()
            asked.append(sources.split()[3])
            if present not in sources:
                raise redis8.Missing("Hash Sum mismatch")
            (work / "archives" / "redis-tools_8_amd64.deb").touch()
        return ""

    return run


def test_where_there_is_none_it_is_said_how_to_get_it() -> None:
    with pytest.raises(redis8.Missing, match=r"python tests/redis8\.py"):
        redis8.command()


def test_a_server_of_ones_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(redis8.EXTERNAL, "/opt/redis-server")
    assert redis8.command() == ["/opt/redis-server"]
    redis8.fetch()


@pytest.mark.parametrize("present", ["mirror.invalid", redis8.SNAPSHOT])
def test_it_comes_from_the_mirror_or_else_from_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, present: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(redis8, "_run", apt(asked, present))
    assert redis8.main() == 0
    assert asked == ["http://mirror.invalid/debian/", redis8.SNAPSHOT][: len(asked)]
    assert present in asked[-1]
    assert Path(redis8.command()[-1]).parent == redis8.folder() / "usr" / "bin"


def test_what_apt_refuses_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(redis8, "_run", apt([], "neither"))
    assert redis8.main() == 1
    assert capsys.readouterr().err.count("Hash Sum mismatch") == 2
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
