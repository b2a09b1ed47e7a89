"""`polyhost cache stats|list|purge|show`: answers kept to be given again (docs/cache.md)."""

import argparse

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    open_registry,
    print_fields,
    print_json,
    print_table,
)
from gateway.service import cache as service_cache

_LISTED = 40
"""Characters of a text."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add_command(commands, "stats", "what is kept, by gateway process", _stats, with_json=True)
    listed = add_command(commands, "list", "what is kept of a tenant", _list, with_json=True)
    listed.add_argument("--tenant", required=True, help="name or id")
    listed.add_argument("--model", default="", help="name")
    listed.add_argument("--limit", type=int, default=100, metavar="N", help="at most (100)")
    purge = add_command(commands, "purge", "forget answers, now and everywhere", _purge)
    purge.add_argument("--tenant", default="", help="name or id")
    purge.add_argument("--model", default="", help="name")
    purge.add_argument("--key", default="", help="id (key_...) or public id")
    purge.add_argument("--text", default="", help="what the user said last, to the letter")
    show = add_command(commands, "show", "where an answer came from", _show, with_json=True)
    show.add_argument("request_id", help="of the header x-polyhost-cache-entry")
    show.add_argument("--tenant", default="", help="name or id (all are looked through)")


def _stats(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        rows = service_cache.cache_stats(control)
    if options.json:
        print_json(rows)
        return 0
    print_table(
        ("GATEWAY", "STORE", "ENTRIES", "BYTES"),
        [(r["gateway"], r["store"], r["num_entries"], r["num_bytes"]) for r in rows],
    )
    return 0


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        rows = service_cache.list_entries(control, options.tenant, options.model, options.limit)
    if options.json:
        print_json(rows)
        return 0
    print_table(
        ("REQUEST", "MODEL", "KEY", "MADE", "QUESTION", "ANSWER"),
        [
            (
                *(r["request_id"], r["model"], r["key_id"], instant(r["made_at"])),
                *(_cut(r[name]) for name in ("question", "answer")),
            )
            for r in rows
        ],
    )
    return 0


def _cut(text: str) -> str:
    """On one line; of a tenant's text nothing that a terminal obeys."""
    return "".join(c if c.isprintable() else " " for c in text[:_LISTED])


def _purge(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        count = service_cache.purge_cache(
            control, options.tenant, options.model, options.key, options.text
        )
    print("purged all of it" if count is None else f"purged {count} answers")
    return 0


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        entry = service_cache.show_entry(control, options.request_id, options.tenant)
    if options.json:
        print_json(entry)
        return 0
    times = {name: instant(entry[name]) for name in ("made_at", "expires_at")}
    print_fields(entry | times)
    return 0
