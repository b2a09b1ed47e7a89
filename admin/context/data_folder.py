"""Which database a data folder belongs to, and that its files are this user's alone.

    registry_version.database_id   what a database calls itself, drawn at a server's first start
    FOLDER/database-id             the database whose packs and postings are in the folder

A start deletes packs that its database does not know, and writes what is left in the journals into
it. On another database (the variable with the URL is missing, the file was emptied) that would be
the end of all packs, and postings would go where nobody looks. So `check_database` comes before
anything is made, upgraded, deleted or written, and refuses where the two do not belong together:

    the folder names a database      it must be this one
    it names none (made by 0.1.0,    the folder has nothing to lose, or the database knows one of
    or a start died in between)      its packs; without packs, the database has tenants

What a folder names has the kind of database in it: after a move from SQLite to PostgreSQL with all
rows, the file that stayed behind is not taken for it. Several servers may share a database, each
with a folder of its own. `bind_database` writes the names down, in the database first: after a
crash in between the folder still names none. `polyhost db adopt` is that without the check, and
leaves an entry in the audit log.

What a server and the commands make in a data folder is readable by this user alone: digests of
passwords and keys, bills, weights. So commands that make files there (`check_owner`: those that
register a model or begin a database) refuse where another user's server could not read them. The
folder itself is the operator's, and may have been there
before with rights for others.
"""

import contextlib
import logging
import os
import pwd
import shlex
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection, NullPool, inspect, select

from admin.context.registration_files import DOWNLOADS_FOLDER, LOGS_FOLDER
from gateway.settings.cluster_settings import CLUSTER_FOLDER
from gateway.settings.settings import JOURNAL_FOLDER, PACKS_FOLDER, Settings
from gateway.settings.state_settings import OBJECTS_FOLDER
from registry import audit
from registry.accounts.tenants import Tenant
from registry.audit import RegistryVersion
from registry.base import MAX_NAME_LEN
from registry.errors import Forbidden, WrongDatabase
from registry.models.catalog import Model
from registry.models.revisions import ModelRevision
from registry.session import (
    database_exists,
    make_engine,
    reading,
    shown,
    sqlite_path,
    writing,
)

logger = logging.getLogger(__name__)

DATABASE_ID = "database-id"
PRIVATE = (
    *(PACKS_FOLDER, JOURNAL_FOLDER, DOWNLOADS_FOLDER, LOGS_FOLDER, OBJECTS_FOLDER),
    *("exports", "run", "cache-calibrations", "demo_api_key", "fair_share.json", CLUSTER_FOLDER),
)
"""What others may not look into, beside the database's file."""


def check_database(settings: Settings) -> None:
    """Raises WrongDatabase where the data folder belongs to another database. Changes nothing."""
    folder = settings.data_path
    named, packs = _named(folder), _packs(folder)
    if not (named or packs or has_journal(folder)):
        return
    url = settings.registry_url
    if database_exists(url):
        engine = make_engine(url, poolclass=NullPool)
        with engine.connect() as connection:
            if named == _name(connection) if named else _knows(connection, packs):
                return
    why = f"the data folder {folder} belongs to another database than {shown(url)}"
    if not named and packs:
        why = f"none of the {len(packs)} packs in {folder} is known to {shown(url)}"
        why += ": the folder belongs to another database"
    elif not named:
        why = f"the data folder {folder} has a journal, but {shown(url)} has no tenants"
        why += ": the folder belongs to another database"
    then = ["deletes packs that it does not know"] if packs else []
    then += ["writes the journal's postings into it"] if has_journal(folder) else []
    raise WrongDatabase(
        f"{why}, or that database was emptied: check --data-dir, set database_url "
        "(POLYHOST_DATABASE_URL) to the database used before, or restore it. To use this database "
        "on purpose, run `polyhost db adopt`"
        + (f": the next start then {' and '.join(then)}" if then else "")
    )


def check_owner(settings: Settings) -> None:
    """Raises Forbidden where the server could not read what this process makes in the data folder,
    because they are not the same user. Leaves nothing behind.

    The server's user is the owner of the marker, or else of the folder. What counts is the owner
    that a new file gets: a mounted file system may have its own rules.
    """
    folder = settings.data_path
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            mine = os.fstat(made.fileno()).st_uid
    except FileNotFoundError:
        return  # the folder will be this user's
    except PermissionError:
        mine = os.geteuid()
    marker = folder / DATABASE_ID
    owner = (marker if os.path.exists(marker) else folder).stat().st_uid
    if owner == mine:
        return
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:  # an account of another machine or container
        name = f"#{owner}"
    line = f"sudo -u {shlex.quote(name)} polyhost ... --data-dir {shlex.quote(str(folder))}"
    raise Forbidden(
        f"the data folder {folder} is used by the user {name}, whose server could not read what "
        f"this command makes there: run the command as that user (`{line}`)"
    )


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What is made meanwhile, by children too, is this user's alone. For a process as a whole."""
    mask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(mask)


@private_files()
def bind_database(settings: Settings) -> None:
    """The data folder belongs to this database from now on. The schema must be there."""
    engine = make_engine(settings.registry_url, poolclass=NullPool)
    with writing(engine, "server") as session:
        name = f"{engine.dialect.name}-{audit.ensure_database_id(session)}"
    folder = settings.data_path
    if _named(folder) == name:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = folder / f"{DATABASE_ID}.{os.getpid()}"
    with partial.open("w", encoding="ascii") as stream:
        stream.write(name)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(folder / DATABASE_ID)


def adopt_database(settings: Settings, actor: str) -> None:
    """`bind_database` where the check would refuse, with an entry in the audit log. The schema must
    be there."""
    before = _named(settings.data_path)
    bind_database(settings)
    names = ({"database": name} for name in (before, _named(settings.data_path)))
    target = str(settings.data_path)[-MAX_NAME_LEN:]
    engine = make_engine(settings.registry_url, poolclass=NullPool)
    with writing(engine, actor) as session:
        audit.record(session, time.time(), "database.adopt", target, *names)


def secure_files(settings: Settings) -> None:
    """Take from others what an earlier release or another program let them read, with a word in
    the log. Where links lead is the operator's."""
    paths = [settings.data_path / name for name in PRIVATE]
    if (database := sqlite_path(settings.registry_url)) is not None:
        paths += [database.with_name(database.name + end) for end in ("", "-wal", "-shm")]
    changed = []
    for path in paths:
        try:
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o077:
                path.chmod(stat.S_IMODE(mode) & ~0o077)
                changed.append(str(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("others may read %s, and its rights cannot be changed: %s", path, error)
    if changed:
        logger.warning("others could read these; now only this user can: %s", ", ".join(changed))


def unknown_packs(settings: Settings) -> int:
    """How many packs of the data folder the database does not know. The schema must be there."""
    engine = make_engine(settings.registry_url, poolclass=NullPool)
    with reading(engine) as session:
        return len(_packs(settings.data_path) - _known_packs(session.connection()))


def has_journal(folder: Path) -> bool:
    """Whether postings in the data folder may not be in a database yet."""
    return any((folder / JOURNAL_FOLDER).glob("*/*.journal"))


def _named(folder: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (folder / DATABASE_ID).read_text(encoding="ascii", errors="replace").strip()
    return ""


def _packs(folder: Path) -> set[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = {path.name for path in (folder / PACKS_FOLDER).iterdir()}
        return {name for name in names if not name.startswith(".")}  # those are being written
    return set()


def _name(connection: Connection) -> str:
    """ "" before migration 0016, and before a server has started on it."""
    inspector, table = inspect(connection), RegistryVersion.__tablename__
    columns = inspector.get_columns(table) if inspector.has_table(table) else []
    if not any(column["name"] == "database_id" for column in columns):
        return ""
    name = connection.scalar(select(RegistryVersion.database_id))
    return f"{connection.dialect.name}-{name}" if name else ""


def _knows(connection: Connection, packs: set[str]) -> bool:
    """By its content, of whatever release."""
    if packs:
        return not packs.isdisjoint(_known_packs(connection))
    has_tenants = inspect(connection).has_table(Tenant.__tablename__)
    return has_tenants and connection.scalar(select(Tenant.id).limit(1)) is not None


def _known_packs(connection: Connection) -> set[str]:
    inspector = inspect(connection)
    found: set[str] = set()
    for row in (Model, ModelRevision):
        if inspector.has_table(row.__tablename__):
            found.update(connection.scalars(select(row.pack)))
    return found
