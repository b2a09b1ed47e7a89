"""`polyhost audit list`: who changed what, when, from what to what."""

import argparse
import json
from dataclasses import asdict

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    note,
    open_registry,
    parse_instant,
    print_json,
    print_table,
)
from gateway.service import audit as service_audit
from registry.audit import MAX_PAGE, AuditEntry, AuditFilter
from registry.base import JsonObject
from registry.errors import InvalidValue


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    every = add_command(commands, "list", "changes, newest first", _list, with_json=True)
    every.add_argument("--actor", default="", help="only by this one, such as cli:root")
    every.add_argument("--action", default="", help="only this, such as key.revoke or all of key")
    every.add_argument("--target", default="", help="only of this: id or name")
    every.add_argument(
        "--from", dest="from_at", type=parse_instant, metavar="DATE", help="ISO, UTC"
    )
    every.add_argument(
        "--to", dest="to_at", type=parse_instant, metavar="DATE", help="ISO, UTC; not included"
    )
    every.add_argument("--limit", type=int, default=50, metavar="N", help="at most (50)")
    every.add_argument(
        "--before", type=int, metavar="ID", help="go on behind this entry: the last one shown"
    )


def _list(options: argparse.Namespace) -> int:
    if not 1 <= options.limit <= MAX_PAGE:
        raise InvalidValue(f"--limit must be 1 to {MAX_PAGE}")
    wanted = AuditFilter(
        options.actor, options.action, options.target, options.from_at, options.to_at
    )
    with open_registry(options) as control:
        found = service_audit.list_audit(control, wanted, options.before, options.limit)
    if options.json:
        print_json([asdict(entry) for entry in found])
        return 0
    print_table(
        ("ID", "AT (UTC)", "ACTOR", "ACTION", "TARGET", "CHANGE"),
        [
            (entry.id, instant(entry.at), entry.actor, entry.action, entry.target, _words(entry))
            for entry in found
        ],
    )
    if len(found) == options.limit:
        note(f"there may be more: --before {found[-1].id}")
    return 0


def _words(entry: AuditEntry) -> str:
    """What differs, such as `weight 1.0 -> 2.0`; of what is new or gone, its name."""
    before, after = entry.before, entry.after
    if before is None or after is None:
        there: JsonObject = after or before or {}
        return str(there.get("name", ""))
    changed = [(name, before.get(name), value) for name, value in after.items()]
    return ", ".join(f"{n} {_short(old)} -> {_short(new)}" for n, old, new in changed if old != new)


def _short(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
