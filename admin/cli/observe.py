"""What the server did and holds: `polyhost audit list`, `polyhost cache stats|list|purge|show`, and
`polyhost why` and `polyhost decisions`, which ask the running server. Tenants are shown by name.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from msgspec import to_builtins

from admin.cli.common import (
    add_command,
    add_commands,
    add_common_options,
    add_date_option,
    add_limit_option,
    call,
    instant,
    note,
    open_registry,
    print_fields,
    print_json,
    print_table,
    settings_of,
    show_rows,
)
from admin.operations import cache, server, tenants
from admin.operations.server import DecisionView
from gateway.dispatch.policy.reasons import OUTCOMES
from gateway.ipc.control_socket import ask
from registry.audit import MAX_PAGE, AuditEntry, AuditFilter
from registry.base import JsonObject
from registry.errors import InvalidValue, RegistryError

_LISTED = 40
"""Characters of a text."""
MAX_ROWS = 1000


def configure_audit(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    every = add_command(commands, "list", "list changes, newest first", _list_audit, with_json=True)
    every.add_argument("--actor", default="", help="only changes by this actor, such as cli:root")
    every.add_argument(
        "--action",
        default="",
        help="only this action, such as key.revoke; `key` means every key.* action",
    )
    every.add_argument("--target", default="", help="only changes to this object: id or name")
    add_date_option(every, "--from", "from_at", "only from this ISO date or time on (UTC)")
    add_date_option(every, "--to", "to_at", "only before this ISO date or time (UTC)")
    add_limit_option(every, 50)
    every.add_argument(
        "--before",
        type=int,
        metavar="ID",
        help="only entries older than this one; use the last ID shown to see the next page",
    )


def _list_audit(options: argparse.Namespace) -> int:
    if not 1 <= options.limit <= MAX_PAGE:
        raise InvalidValue(f"--limit must be 1 to {MAX_PAGE}")
    wanted = AuditFilter(
        options.actor, options.action, options.target, options.from_at, options.to_at
    )
    found = call(options, server.list_audit, wanted, options.before, options.limit)
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
        note(f"there may be more entries: see them with --before {found[-1].id}")
    return 0


def _words(entry: AuditEntry) -> str:
    """What differs, such as `weight 1.0 -> 2.0`; of what is new or gone, its name."""
    before, after = entry.before, entry.after
    if before is None or after is None:
        there: JsonObject = after or before or {}
        return str(there.get("name", ""))
    changed = [(name, before.get(name), value) for name, value in after.items()]
    return ", ".join(
        f"{n} {_shown_value(old)} -> {_shown_value(new)}" for n, old, new in changed if old != new
    )


def _shown_value(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def configure_cache(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add_command(
        commands, "stats", "show the size of the cache per gateway process", _stats, with_json=True
    )
    listed = add_command(
        commands, "list", "list a tenant's cached answers", _list_entries, with_json=True
    )
    listed.add_argument("--tenant", required=True, help="name or id of the tenant")
    listed.add_argument("--model", default="", help="only answers of this model")
    add_limit_option(listed, 100)
    purge = add_command(commands, "purge", "delete cached answers on all gateways", _purge)
    purge.add_argument("--tenant", default="", help="only of this tenant: name or id")
    purge.add_argument("--model", default="", help="only of this model")
    purge.add_argument("--key", default="", help="only of this key: id (key_...) or public id")
    purge.add_argument("--text", default="", help="only answers to exactly this last user message")
    show = add_command(
        commands,
        "show",
        "show the entry that a cached answer came from",
        _show_entry,
        with_json=True,
    )
    show.add_argument("request_id", help="request ID in the response header x-polyhost-cache-entry")
    show.add_argument(
        "--tenant", default="", help="name or id of the tenant (default: search all tenants)"
    )


def _stats(options: argparse.Namespace) -> int:
    rows = call(options, cache.cache_stats)
    return show_rows(
        options,
        rows,
        lambda row: row,
        ("GATEWAY", "STORE", "ENTRIES", "BYTES"),
        lambda r: (r["gateway"], r["store"], r["num_entries"], r["num_bytes"]),
    )


def _list_entries(options: argparse.Namespace) -> int:
    rows = call(options, cache.list_entries, options.tenant, options.model, options.limit)
    return show_rows(
        options,
        rows,
        lambda row: row,
        ("REQUEST", "MODEL", "KEY", "MADE", "QUESTION", "ANSWER"),
        lambda r: (
            *(r["request_id"], r["model"], r["key_id"], instant(r["made_at"])),
            *(_cut(r[name]) for name in ("question", "answer")),
        ),
    )


def _cut(text: str) -> str:
    """On one line; of a tenant's text nothing that a terminal obeys."""
    return "".join(c if c.isprintable() else " " for c in text[:_LISTED])


def _purge(options: argparse.Namespace) -> int:
    count = call(
        options, cache.purge_cache, options.tenant, options.model, options.key, options.text
    )
    print("purged all matching answers" if count is None else f"purged {count} answers")
    return 0


def _show_entry(options: argparse.Namespace) -> int:
    entry = call(options, cache.show_entry, options.request_id, options.tenant)
    if options.json:
        print_json(entry)
        return 0
    times = {name: instant(entry[name]) for name in ("made_at", "expires_at")}
    print_fields(entry | times)
    return 0


def configure_why(parser: argparse.ArgumentParser) -> None:
    """Both commands; which one is the parser's own name."""
    add_common_options(parser)
    if parser.prog.endswith("why"):
        what = "a hosted model or the ID of a request (default: everything that waits)"
        parser.add_argument("what", nargs="?", default="", metavar="MODEL|REQUEST_ID", help=what)
        parser.add_argument("--tenant", default="", help="only requests of this tenant: name or id")
        parser.set_defaults(run=_why)
    else:
        parser.add_argument("--model", default="", help="only decisions about this model")
        grants = "show which workers requests were granted to, where there was a choice"
        parser.add_argument("--grants", action="store_true", help=grants)
        parser.set_defaults(run=_decisions)
    parser.add_argument(
        "--limit",
        type=int,
        default=50,
        help=f"maximum number of rows, up to {MAX_ROWS} (default: 50)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _why(options: argparse.Namespace) -> int:
    names = _tenants(options)
    tenant_id = ""
    if options.tenant:
        by_name = {name: tenant for tenant, name in names.items()} | {id_: id_ for id_ in names}
        if options.tenant not in by_name:
            raise RegistryError(f"unknown tenant {options.tenant!r}: see `polyhost tenants list`")
        tenant_id = by_name[options.tenant]
    answer = ask(
        settings_of(options).data_path,
        ask="why",
        what=options.what,
        tenant=tenant_id,
        limit=options.limit,
    )
    rows = answer.get("requests") or answer.get("ended") or answer["waiting"]
    for row in rows:
        row["tenant"] = names.get(row["tenant_id"], row["tenant_id"])
    if options.json:
        print_json(answer)
    elif "requests" in answer:
        for row in rows:
            _show_request(row, names)
    elif "ended" in answer:
        for row in rows:
            print(f"{row['request_id']}, of {row['tenant']} for {row['model']}, has ended")
            _show_choice(row, row["load"], {})
    else:
        _show_waiting(answer, rows)
    return 0


def _show_request(row: dict[str, Any], names: dict[str, str]) -> None:
    """All about one request."""
    fields: dict[str, object] = {
        "request": row["request_id"],
        "tenant": row["tenant"],
        "model": row["model"],
        "waited": f"{row['waited_s']:.1f} s",
        "why": f"{row['code']}: {row['text']}",
    }
    if row["left_s"] is not None:
        fields["times out"] = f"in {row['left_s']:.0f} s"
    if row["code"] != "running":
        fields["own older requests"] = row["own_ahead"]
        fields["tenants ahead"] = f"{row['num_tenants_ahead']}; own counter: {row['counter']:.3f}"
        for ahead in row["tenants_ahead"]:
            name = names.get(ahead["tenant_id"], ahead["tenant_id"])
            fields[f"  {name}"] = f"{ahead['counter']:.3f}, {ahead['num_waiting']} waiting"
    print_fields(fields)
    _show_choice(row["choice"], row["load"], row["elsewhere"])


def _show_choice(
    choice: dict[str, Any] | None, load: dict[str, Any] | None, elsewhere: dict[str, float]
) -> None:
    """Which workers came into question for a request, and for the load of its model."""
    if choice is not None:
        chosen, num = choice["workers"][0]["worker_id"], choice["num_workers"]
        print(f"{instant(choice['at'])}: granted to {chosen} of {num} workers: {choice['reason']}")
        header = ("WORKER", "COST", "WAIT", "READ", "PROMPT TOKENS THERE", "RUNNING", "OUTCOME")
        print_table(header, [_cost(one, choice) for one in choice["workers"]])
    if load is not None:
        print(f"{instant(load['at'])}: model loaded on {load['worker']}: {load['reason']}")
        if load["workers"]:
            header = ("WORKER", "LOAD", "FROM", "WAIT", "OTHER LOADS", "FREE MEMORY", "OUTCOME")
            print_table(header, [_load(one) for one in load["workers"]])
    for worker, load_s in elsewhere.items():
        print(f"{worker} does not have the model: a load would take {load_s:.3f} s")
    print()


def _cost(one: dict[str, Any], choice: dict[str, Any]) -> tuple[object, ...]:
    delay_s, read_s = one["delay_s"], one["read_s"]
    seconds = [f"{value:.3f} s" for value in (delay_s + read_s, delay_s, read_s)]
    there = f"{one['cached_tokens']} of {choice['num_prompt_tokens']}"
    return one["worker_id"], *seconds, there, one["num_running"], one["outcome"]


def _load(one: dict[str, Any]) -> tuple[object, ...]:
    load_s, wait_s, loss_s = (f"{one[name]:.3f} s" for name in ("load_s", "wait_s", "loss_s"))
    tier = "host memory" if one["is_warm"] else "disk"
    free = f"{one['free_bytes'] / 2**20:.0f} MiB"
    return one["worker_id"], load_s, tier, wait_s, loss_s, free, one["outcome"]


def _show_waiting(answer: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    model = answer.get("model")
    if model:
        where = ", ".join(f"{state} on {worker}" for worker, state in model["workers"].items())
        print(f"{model['name']}: {model['failure'] or where or 'no worker is connected'}")
    if not rows:
        print("no requests are waiting")
        return
    print_table(
        ("TENANT", "MODEL", "WAITING", "OLDEST", "WHY", "REQUEST"),
        [
            (
                row["tenant"],
                row["model"],
                row["num_waiting"],
                f"{row['waited_s']:.1f} s",
                f"{row['code']}: {row['text']}",
                row["request_id"],
            )
            for row in rows
        ],
    )
    shown = sum(row["num_waiting"] for row in rows)
    if shown < answer["num_waiting"]:
        note(f"{answer['num_waiting'] - shown} more requests wait: raise --limit to see them")


def _decisions(options: argparse.Namespace) -> int:
    names = _tenants(options)
    if options.grants:
        return _grants(options, names)
    found = call(options, server.decisions, options.model, options.limit)
    if options.json:
        answer = to_builtins(found)
        for row in answer["decisions"]:
            row["tenant"] = names.get(row["tenant_id"], row["tenant_id"])
        print_json(answer)
        return 0
    print_table(
        ("AT", "TIMES", "WHAT", "WHY", "MODEL", "WORKER", "FIGURES"),
        [
            (
                instant(row.last_at),
                row.count,
                row.kind,
                row.reason,
                row.model or "-",
                row.worker or "-",
                _figures(row, found.at, names.get(row.tenant_id, row.tenant_id)),
            )
            for row in found.decisions
        ],
    )
    return 0


def _grants(options: argparse.Namespace, names: dict[str, str]) -> int:
    data_path = settings_of(options).data_path
    answer = ask(data_path, ask="grants", model=options.model, limit=options.limit)
    for row in answer["grants"]:
        row["tenant"] = names.get(row["tenant_id"], row["tenant_id"])
    if options.json:
        print_json(answer)
        return 0
    print_table(
        ("AT", "REQUEST", "TENANT", "MODEL", "WHY", "WORKERS"),
        [
            (
                *(instant(row["at"]), row["request_id"], row["tenant"], row["model"]),
                row["reason"],
                ", ".join(
                    f"{one['worker_id']}: {one['delay_s'] + one['read_s']:.3f} s, {one['outcome']}"
                    for one in row["workers"]
                ),
            )
            for row in answer["grants"]
        ],
    )
    return 0


def _figures(row: DecisionView, now_at: float, tenant: str) -> str:
    figures = dict(row.figures)
    if "until_s" in figures:
        figures["until_s"] -= now_at
    parts = [f"{name}={_short(value)}" for name, value in figures.items()]
    outcomes = ((one["model_id"], one["outcome"]) for one in row.candidates)
    parts += [f"{model}: {OUTCOMES.get(outcome, outcome)}" for model, outcome in outcomes]
    parts += [f"{one['worker_id']}: {one['outcome']}" for one in row.workers]
    parts += [text for text in (tenant, row.detail) if text]
    return ", ".join(parts)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _tenants(options: argparse.Namespace) -> dict[str, str]:
    """Names by id."""
    with open_registry(options) as context:
        return {tenant.id: tenant.name for tenant in tenants.list_tenants(context)}
