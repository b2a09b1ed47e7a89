"""Commands run in this process, in a working directory of the test's own."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from argon2 import PasswordHasher

from admin.cli.main import main
from admin.context.operator_context import open_context
from gateway.settings.settings import Settings
from registry.accounts import users
from registry.models import catalog

Run = Callable[..., str]
AddModels = Callable[..., None]


@pytest.fixture
def quick_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests that cost little."""
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(users, "PasswordHasher", lambda: quick)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An absent data folder, in a working directory without a polyhost.toml."""
    monkeypatch.chdir(tmp_path)
    for name in ("POLYHOST_DATA_DIR", "POLYHOST_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "data"


@pytest.fixture
def add_models(data_dir: Path) -> AddModels:
    """Puts names into the catalog of an existing database."""

    def add(*names: str) -> None:
        with open_context(Settings(data_dir=str(data_dir)), "test") as context:
            for name in names:
                with context.writing() as session:
                    catalog.add_model(session, name, "/models/x", now_at=context.clock())

    return add


@pytest.fixture
def run(data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command that must end with `status`, with what is typed into it; what it printed, or the
    one line that says what is wrong."""

    def run(*arguments: str, typed: str = "", status: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert main([*arguments, "--data-dir", str(data_dir)]) == status
        out, err = capsys.readouterr()
        if status:
            assert err.count("\n") == 1 or err.startswith("usage: "), err
        return err if status else out

    return run
