"""A data folder and its database: no start and no command on another one changes anything."""

import asyncio
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin.cli.main import main
from admin.context.data_folder import (
    bind_database,
    check_database,
    secure_files,
    unknown_packs,
)
from admin.operations.models import tidy
from gateway.server.supervisor import serve
from gateway.settings.settings import Settings
from registry import audit
from registry.accounts import tenants
from registry.audit import AuditEntry
from registry.errors import WrongDatabase
from registry.models import catalog
from registry.schema import downgrade
from registry.session import make_engine, reading, writing
from tests.migrated import migrated
from tests.postgres import Databases

URL = "POLYHOST_DATABASE_URL"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(URL, raising=False)
    return tmp_path / "data"


def settings_of(folder: Path, url: str = "") -> Settings:
    return Settings(data_dir=str(folder), database_url=url, port=0)


def lived(settings: Settings, *, bound: bool = True) -> None:
    """What a server leaves that was killed: a model with its pack, a tenant, a journal."""
    migrated(settings.registry_url)
    if bound:
        check_database(settings)
        bind_database(settings)
    engine = make_engine(settings.registry_url)
    with writing(engine, "test") as session:
        tenants.create_tenant(session, "t", now_at=1.0)
        model = catalog.add_model(session, "m", "/source", now_at=1.0)
        facts = catalog.PackFacts("rev", "pack-1", "llama", "float32", 10, 64, 100)
        catalog.finish(session, model.registration, facts, now_at=2.0)
    engine.dispose()
    (settings.data_path / "packs/pack-1").mkdir(parents=True)
    (settings.data_path / "packs/pack-1/blob").write_text("weights")
    (settings.data_path / "journal/gateway-0").mkdir(parents=True)
    (settings.data_path / "journal/gateway-0/00000001.journal").write_bytes(b"postings")


def left(folder: Path) -> dict[str, bytes]:
    """Every file but the locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(settings: Settings) -> str:
    """A start that changes nothing; what it says."""
    before = left(settings.data_path)
    with pytest.raises(WrongDatabase) as found:
        asyncio.run(asyncio.wait_for(serve(settings, ("false",)), 20.0))
    assert left(settings.data_path) == before
    return str(found.value)


def last_entry(settings: Settings) -> AuditEntry:
    engine = make_engine(settings.registry_url)
    with reading(engine) as session:
        (entry,) = audit.latest(session, 1)
    engine.dispose()
    return entry


@pytest.fixture
def postgresql(postgres: Databases) -> Iterator[str]:
    url = postgres.fresh_registry()
    yield url
    postgres.drop(url)


def test_a_start_without_the_database_url_changes_nothing(folder: Path, postgresql: str) -> None:
    lived(settings_of(folder, postgresql))
    message = refused(settings_of(folder))
    assert "--data-dir" in message
    assert "POLYHOST_DATABASE_URL" in message
    assert "polyhost db adopt" in message
    assert "\n" not in message
    check_database(settings_of(folder, postgresql))


def test_an_emptied_database_is_not_begun_anew(folder: Path) -> None:
    settings = settings_of(folder)
    lived(settings)
    database = folder / "polyhost.db"
    content = database.read_bytes()
    os.truncate(database, 0)
    refused(settings)
    database.unlink()
    refused(settings)
    database.write_bytes(content)
    check_database(settings)


@pytest.mark.parametrize(
    "line", [("tenants", "list"), ("tenants", "add", "u"), ("models", "list"), ("db", "upgrade")]
)
def test_a_command_on_another_database_changes_nothing(
    folder: Path, line: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(folder)
    lived(settings)
    (folder / "downloads/org--m@1").mkdir(parents=True)
    (folder / "polyhost.db").unlink()
    before = left(folder)
    assert main([*line, "--data-dir", str(folder)]) == 1
    assert "belongs to another database" in capsys.readouterr().err
    assert left(folder) == before
    assert (folder / "downloads/org--m@1").exists()


def test_adopting_is_done_on_purpose_and_says_what_follows(
    folder: Path,
    postgresql: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lived(settings_of(folder))
    moved = settings_of(folder, postgresql)
    refused(moved)
    monkeypatch.setenv(URL, postgresql)
    assert main(["db", "adopt", "--data-dir", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "does not know: 1;" in said
    assert "journal" in said
    check_database(moved)
    assert unknown_packs(moved) == 1
    refused(settings_of(folder))  # the file that stayed behind, whatever it knows
    entry = last_entry(moved)
    assert (entry.action, entry.target) == ("database.adopt", str(folder))
    assert entry.actor.startswith("cli:")
    assert entry.before is not None
    assert entry.after is not None
    assert entry.before["database"].startswith("sqlite-")
    assert entry.after["database"] == (folder / "database-id").read_text()


def test_a_move_with_all_rows_leaves_the_old_file_behind_for_good(folder: Path) -> None:
    """The kind of database is in the name: rows that are copied bring the rest of it along."""
    lived(settings_of(folder))
    named = (folder / "database-id").read_text()
    assert named.startswith("sqlite-")
    (folder / "database-id").write_text(named.replace("sqlite", "postgresql"))
    refused(settings_of(folder))


def test_a_folder_of_0_1_0_is_taken_by_the_database_that_knows_its_packs(
    folder: Path, tmp_path: Path
) -> None:
    settings = settings_of(folder)
    lived(settings, bound=False)
    downgrade(settings.registry_url, "0015")
    other = settings_of(folder, f"sqlite:///{tmp_path / 'other.db'}")
    assert "none of the 1 packs" in refused(other)
    migrated(other.registry_url)
    engine = make_engine(other.registry_url)
    with writing(engine, "test") as session:  # it is in use, but not for this folder
        tenants.create_tenant(session, "t", now_at=1.0)
    engine.dispose()
    refused(other)
    check_database(settings)
    migrated(settings.registry_url)
    check_database(settings)  # a start that died before it had written the name
    bind_database(settings)
    check_database(settings)
    tidy(settings)
    assert (folder / "packs/pack-1/blob").exists()


def test_a_journal_alone_goes_into_a_database_that_is_in_use(folder: Path) -> None:
    settings = settings_of(folder)
    (folder / "journal/gateway-0").mkdir(parents=True)
    (folder / "journal/gateway-0/00000001.journal").write_bytes(b"postings")
    refused(settings)
    migrated(settings.registry_url)
    message = refused(settings)
    assert "has a journal" in message
    assert "packs" not in message
    assert message.endswith("the next start then writes the journal's postings into it")
    engine = make_engine(settings.registry_url)
    with writing(engine, "test") as session:
        tenants.create_tenant(session, "t", now_at=1.0)
    engine.dispose()
    check_database(settings)


def test_servers_share_a_database_and_each_has_its_folder(folder: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    first, second = settings_of(folder, url), settings_of(tmp_path / "second", url)
    lived(first)
    check_database(second)
    bind_database(second)
    names = [(s.data_path / "database-id").read_text() for s in (first, second)]
    assert names[0] == names[1]
    check_database(first)


def test_a_command_elsewhere_leaves_no_data_folder_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's own machine: only the database's address is set."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    lived(settings_of(tmp_path / "server", url))
    monkeypatch.setenv(URL, url)
    assert main(["tenants", "add", "u", "--data-dir", str(folder)]) == 0
    assert not folder.exists()


def rights(folder: Path) -> dict[str, str]:
    """What others may do with each entry, in octal; 0 is nothing."""
    return {path.name: oct(path.lstat().st_mode & 0o077) for path in folder.iterdir()}


def test_what_commands_make_in_a_folder_of_anybodys_is_this_users(folder: Path) -> None:
    """Made by mkdir, systemd or a container before: others may look into it."""
    folder.mkdir(mode=0o755)
    mask = os.umask(0o022)
    try:
        assert main(["tenants", "add", "u", "--data-dir", str(folder)]) == 0
        engine = make_engine(settings_of(folder).registry_url)
        with writing(engine, "test") as session:
            tenants.create_tenant(session, "t", now_at=1.0)
            assert rights(folder).keys() >= {"polyhost.db", "polyhost.db-wal", "polyhost.db-shm"}
            assert set(rights(folder).values()) == {"0o0"}
        engine.dispose()
        assert main(["models", "add", "m", str(folder.parent / "none"), "--data-dir", str(folder)])
        assert set(rights(folder).values()) == {"0o0"}
    finally:
        assert os.umask(mask) == 0o022
    assert oct(folder.stat().st_mode & 0o777) == "0o755", "the folder is the operator's own"


def test_a_start_takes_back_what_an_earlier_release_let_others_read(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(folder, f"sqlite:///{tmp_path / 'else' / 'registry.db'}")
    (tmp_path / "else").mkdir()
    folder.mkdir(mode=0o755)
    elsewhere = tmp_path / "big disk"
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    (folder / "packs").symlink_to(elsewhere)
    (folder / "exports").mkdir()
    (folder / "exports").chmod(0o755)
    (folder / "notes.txt").write_text("not the server's")
    (folder / "notes.txt").chmod(0o644)
    database = tmp_path / "else/registry.db"
    database.write_bytes(b"")
    database.chmod(0o664)
    secure_files(settings)
    assert rights(folder)["exports"] == rights(database.parent)["registry.db"] == "0o0"
    assert rights(folder)["notes.txt"] == "0o44"
    assert oct(elsewhere.stat().st_mode & 0o077) == "0o55", "a link leads where an operator said"
    (line,) = caplog.messages
    assert "exports" in line
    assert "registry.db" in line
    secure_files(settings)
    assert len(caplog.messages) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
def test_what_the_servers_user_could_not_read_is_not_made(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A registration as root would end in packs that only root can read."""
    source = str(folder.parent / "model")
    lines = [("models", "add", "n", "--source", source), ("models", "update", "m")]
    lines += [("models", "retry", "m"), ("tenants", "add", "u")]
    nobody = pwd.getpwnam("nobody")
    folder.mkdir()
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    for line in (lines[0], lines[-1]):  # would begin a database
        assert main([*line, "--data-dir", str(folder)]) == 1
        assert f"sudo -u nobody polyhost ... --data-dir {folder}" in capsys.readouterr().err
    assert list(folder.iterdir()) == []
    lived(settings_of(folder))
    marker = folder / "database-id"
    os.chown(marker, nobody.pw_uid, nobody.pw_gid)
    before = left(folder)
    for line in lines[:-1]:
        assert main([*line, "--data-dir", str(folder)]) == 1
        assert "sudo -u nobody" in capsys.readouterr().err
    assert left(folder) == before
    assert main([*lines[-1], "--data-dir", str(folder)]) == 0
    os.chown(marker, 0, 0)  # a server in a container, over a folder of the host's user
    assert main(["models", "update", "m", "--data-dir", str(folder)]) == 2
    assert "/source" in capsys.readouterr().err
    os.chown(marker, 61_234, 61_234)
    assert main([*lines[0], "--data-dir", str(folder)]) == 1
    assert "sudo -u '#61234'" in capsys.readouterr().err
