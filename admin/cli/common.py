"""What all groups of commands share: common options, the open registry, tables and JSON, units.

Tables are for people and may change; `--json` is for programs: field names as in the records,
instants as epoch seconds (UTC), money in nano-units.
"""

import argparse
import getpass
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from admin.context.data_folder import bind_database, check_database, check_owner
from admin.context.operator_context import OperatorContext, open_context
from gateway.redis.redis_script import check_url
from gateway.settings.config import load_settings
from gateway.settings.settings import Settings
from registry import schema
from registry.base import LATEST_AT
from registry.errors import SchemaError
from registry.schema import upgrade
from registry.session import database_exists

P = ParamSpec("P")
R = TypeVar("R")
Run = Callable[[argparse.Namespace], int]

NANOS = 10**9
MAX_STORED = 2**63
MAX_DURATION_S = 1000 * 366 * 86400
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


class Commands(Protocol):
    """The part of argparse's subparsers that groups use."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser:
        """A parser for one command."""


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """--data-dir and --config, wherever on the line they stand."""
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="data folder (default: POLYHOST_DATA_DIR or ./data)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="settings file (default: ./polyhost.toml if it exists)",
    )


def add_commands(parser: argparse.ArgumentParser) -> Commands:
    """The commands of a group."""
    return parser.add_subparsers(metavar="COMMAND", required=True)


def add_command(
    commands: Commands, name: str, summary: str, run: Run, *, with_json: bool = False
) -> argparse.ArgumentParser:
    """One command with the common options; `run` gets the parsed line and returns the status."""
    parser = commands.add_parser(name, help=summary, description=summary)
    add_common_options(parser)
    if with_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def add_date_option(
    parser: argparse.ArgumentParser,
    option: str,
    dest: str,
    summary: str,
    default: float | None = None,
    required: bool = False,
) -> None:
    """An ISO date or time (UTC), as epoch seconds."""
    parser.add_argument(
        option,
        dest=dest,
        type=parse_instant,
        default=default,
        required=required,
        metavar="DATE",
        help=summary,
    )


def add_limit_option(parser: argparse.ArgumentParser, default: int) -> None:
    """--limit of a list."""
    summary = f"maximum number of rows (default: {default})"
    parser.add_argument("--limit", type=int, default=default, metavar="N", help=summary)


def settings_of(
    options: argparse.Namespace, overrides: Mapping[str, object] | None = None
) -> Settings:
    """The settings, with what the command line says on top. Raises SettingsError, InvalidValue."""
    settings = load_settings(
        getattr(options, "config", None),
        {**(overrides or {}), "data_dir": getattr(options, "data_dir", None)},
    )
    if settings.redis_url:
        check_url(settings.redis_url)
    return settings


@contextmanager
def open_registry(
    options: argparse.Namespace, *, create: bool = False, makes_files: bool = False
) -> Iterator[OperatorContext]:
    """The registry of the data folder, in the OS user's name.

    `create` makes an absent database; without it an absent one is an error, so that a mistyped
    folder does not come out as an empty list. A schema of another version is always an error: a
    server of that version may be running on it. `makes_files`: the command makes files in the data
    folder that the server must be able to read.
    """
    settings = settings_of(options)
    is_new = not database_exists(settings.registry_url)
    if makes_files or (is_new and create):
        check_owner(settings)
    check_database(settings)
    if is_new:
        if not create:
            raise SchemaError(
                f"no Polyhost database in {settings.data_path}: check --data-dir, or run "
                "`polyhost serve` or `polyhost db upgrade` first"
            )
        upgrade(settings.registry_url)
        bind_database(settings)
    with open_context(settings, f"cli:{os_user()}") as context:
        with context.engine.connect() as connection:
            schema.require(connection)
        yield context


def call(
    options: argparse.Namespace,
    operation: Callable[Concatenate[OperatorContext, P], R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """What the operation returns on the registry of the data folder."""
    with open_registry(options) as context:
        return operation(context, *args, **kwargs)


def os_user() -> str:
    """Who runs this command, for the audit log."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without an account, as in some containers
        return "unknown"


# Output.


def print_json(value: object) -> None:
    """One JSON document."""
    json.dump(value, sys.stdout, indent=2, default=_plain)
    print()


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Left-aligned columns."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def show_rows(
    options: argparse.Namespace,
    found: Iterable[R],
    as_json: Callable[[R], object],
    headers: Sequence[str],
    row: Callable[[R], Sequence[object]],
) -> int:
    """A list: as JSON where it is asked for, else as a table. Returns the status."""
    if options.json:
        print_json([as_json(each) for each in found])
    else:
        print_table(headers, [row(each) for each in found])
    return 0


def print_fields(fields: Mapping[str, object]) -> None:
    """`name  value` lines."""
    width = max(map(len, fields))
    for name, value in fields.items():
        print(f"{name.ljust(width)}  {value}".rstrip())


def note(message: str) -> None:
    """A remark for the person at the terminal; standard output stays clean for programs."""
    print(message, file=sys.stderr)


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


# Units.


def instant(epoch_s: float | None) -> str:
    """2026-01-31 12:00:00, UTC; a dash for never."""
    if epoch_s is None:
        return "-"
    if not epoch_s <= LATEST_AT:
        return "after 9999"
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def parse_instant(text: str) -> float:
    """An ISO date (its first moment) or date and time, UTC where no zone is named."""
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        example = date(2026, 1, 31).isoformat()
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an ISO date such as {example} or {example}T12:00:00"
        ) from error
    return moment.timestamp()


def parse_duration(text: str) -> float:
    """Seconds of 90, 90s, 15m, 12h, 30d or 2w."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 15m, 12h or 30d")
    duration_s = float(match.group(1)) * _SECONDS[match.group(2)]
    if duration_s > MAX_DURATION_S:
        raise argparse.ArgumentTypeError("a duration must not exceed 1000 years")
    return duration_s


def parse_size(text: str) -> int:
    """Bytes of 1073741824, 512M, 1.5GiB: powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2GiB")
    power = " kmgt".index(match.group(2).lower() or " ")
    return math.floor(float(match.group(1)) * (1 << 10 * power))


def size(num_bytes: int) -> str:
    """1.5 GiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_units(text: str) -> int:
    """Nano-units of a decimal number of units."""
    nanos = scaled(text, NANOS)
    if nanos is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount such as 12.50")
    if nanos != nanos.to_integral_value():
        raise argparse.ArgumentTypeError(f"{text!r} has too many decimal places: use at most 9")
    return int(nanos)


def scaled(text: str, by: int) -> Decimal | None:
    """That many times a number; None: it is no number, or none that fits a column."""
    try:
        value = Decimal(text) * by
    except ArithmeticError:
        return None
    return value if value.is_finite() and abs(value) < MAX_STORED else None


def units(nanos: int) -> str:
    """Nano-units as an exact decimal number of units."""
    sign = "-" if nanos < 0 else ""
    whole, rest = divmod(abs(nanos), NANOS)
    return f"{sign}{whole}.{rest:09d}"


def per_million(nanos_per_token: int) -> str:
    """Nano-units a token as units per million tokens."""
    return f"{Decimal(nanos_per_token) / 1000:f}"
