"""`polyhost why` and `polyhost decisions`: what waits and why, and what was decided and why.

Both ask the running server (operator_client.py). Tenants are shown by name.
"""

import argparse
from typing import Any

from gateway.cli.common import (
    add_common_options,
    instant,
    note,
    open_registry,
    print_fields,
    print_json,
    print_table,
    settings_of,
)
from gateway.cli.operator_client import ask
from gateway.service import tenants as service_tenants
from registry.errors import RegistryError

MAX_ROWS = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """Both commands; which one is the parser's own name."""
    add_common_options(parser)
    if parser.prog.endswith("why"):
        what = "a hosted model, or a request's id (all that waits, by tenant and model)"
        parser.add_argument("what", nargs="?", default="", metavar="MODEL|REQUEST_ID", help=what)
        parser.add_argument("--tenant", default="", help="of this tenant only")
        parser.set_defaults(run=_why)
    else:
        parser.add_argument("--model", default="", help="about this model only")
        parser.set_defaults(run=_decisions)
    parser.add_argument("--limit", type=int, default=50, help=f"rows, {MAX_ROWS} at most (50)")
    parser.add_argument("--json", action="store_true", help="for programs")


def _why(options: argparse.Namespace) -> int:
    names = _tenants(options)
    tenant_id = ""
    if options.tenant:
        by_name = {name: tenant for tenant, name in names.items()} | {id_: id_ for id_ in names}
        if options.tenant not in by_name:
            raise RegistryError(f"no tenant {options.tenant!r}")
        tenant_id = by_name[options.tenant]
    answer = ask(
        settings_of(options).data_path,
        ask="why",
        what=options.what,
        tenant=tenant_id,
        limit=options.limit,
    )
    rows = answer.get("requests") or answer["waiting"]
    for row in rows:
        row["tenant"] = names.get(row["tenant_id"], row["tenant_id"])
    if options.json:
        print_json(answer)
    elif "requests" in answer:
        for row in rows:
            _show(row, names)
    else:
        _show_waiting(answer, rows)
    return 0


def _show(row: dict[str, Any], names: dict[str, str]) -> None:
    """All about one request."""
    fields: dict[str, object] = {
        "request": row["request_id"],
        "tenant": row["tenant"],
        "model": row["model"],
        "waited": f"{row['waited_s']:.1f} s",
        "why": f"{row['code']}: {row['text']}",
    }
    if row["left_s"] is not None:
        fields["ends by itself"] = f"in {row['left_s']:.0f} s"
    if row["code"] != "running":
        fields["own older ones"] = row["own_ahead"]
        fields["tenants before"] = f"{row['num_tenants_ahead']}; its counter: {row['counter']:.3f}"
        for ahead in row["tenants_ahead"]:
            name = names.get(ahead["tenant_id"], ahead["tenant_id"])
            fields[f"  {name}"] = f"{ahead['counter']:.3f}, {ahead['num_waiting']} waiting"
    print_fields(fields)
    print()


def _show_waiting(answer: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    model = answer.get("model")
    if model:
        where = ", ".join(f"{state} on {worker}" for worker, state in model["workers"].items())
        print(f"{model['name']}: {model['failure'] or where or 'no worker is connected'}")
    if not rows:
        print("nothing waits")
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
        note(f"and {answer['num_waiting'] - shown} more: raise --limit")


def _decisions(options: argparse.Namespace) -> int:
    names = _tenants(options)
    data_path = settings_of(options).data_path
    answer = ask(data_path, ask="decisions", model=options.model, limit=options.limit)
    for row in answer["decisions"]:
        row["tenant"] = names.get(row["tenant_id"], row["tenant_id"])
    if options.json:
        print_json(answer)
        return 0
    print_table(
        ("AT", "TIMES", "WHAT", "WHY", "MODEL", "WORKER", "FIGURES"),
        [
            (
                instant(row["last_at"]),
                row["count"],
                row["kind"],
                row["reason"],
                row["model"] or "-",
                row["worker"] or "-",
                _figures(row, answer["at"]),
            )
            for row in answer["decisions"]
        ],
    )
    return 0


def _figures(row: dict[str, Any], now_at: float) -> str:
    figures = dict(row["figures"])
    if "until_s" in figures:
        figures["until_s"] -= now_at
    parts = [f"{name}={_short(value)}" for name, value in figures.items()]
    parts += [f"{one['model_id']}: {one['outcome']}" for one in row["candidates"]]
    parts += [text for text in (row["tenant"], row["detail"]) if text]
    return ", ".join(parts)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _tenants(options: argparse.Namespace) -> dict[str, str]:
    """Names by id."""
    with open_registry(options) as control:
        return {tenant.id: tenant.name for tenant in service_tenants.list_tenants(control)}
