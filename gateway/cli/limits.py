"""`polyhost limits set|show|list`: of a key, a tenant, a model or the whole gateway."""

import argparse

from gateway.cli.common import (
    add_command,
    add_commands,
    open_registry,
    parse_units,
    print_fields,
    print_json,
    print_table,
    units,
)
from gateway.service import limits as service_limits
from gateway.service.limits import OwnedLimits
from registry.errors import InvalidValue
from registry.quotas import LIMIT_NAMES, LimitScope

OPTIONS = {
    "requests_per_minute": ("--rpm", "requests a minute"),
    "requests_per_day": ("--rpd", "requests in 24 hours"),
    "tokens_per_minute": ("--tpm", "tokens a minute, of prompts and answers"),
    "tokens_per_day": ("--tpd", "tokens in 24 hours"),
    "input_tokens_per_minute": ("--input-tpm", "tokens of prompts a minute"),
    "input_tokens_per_day": ("--input-tpd", "tokens of prompts in 24 hours"),
    "output_tokens_per_minute": ("--output-tpm", "tokens of answers a minute"),
    "output_tokens_per_day": ("--output-tpd", "tokens of answers in 24 hours"),
    "max_concurrency": ("--concurrency", "requests at a time"),
    "max_prompt_tokens": ("--max-prompt", "tokens of one prompt"),
    "max_output_tokens": ("--max-output", "tokens of one answer"),
    "day_budget_nanos": ("--budget-day", "money of a calendar day (UTC)"),
    "month_budget_nanos": ("--budget-month", "money of a calendar month (UTC)"),
}
BUDGETS = frozenset({"day_budget_nanos", "month_budget_nanos"})


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    change = add_command(commands, "set", "change limits; 0 lifts one", _set, with_json=True)
    add_owner(change)
    for name in LIMIT_NAMES:
        option, summary = OPTIONS[name]
        text = f"{summary}; 0: unlimited"
        kind, metavar = (parse_units, "SUM") if name in BUDGETS else (int, "N")
        change.add_argument(option, type=kind, metavar=metavar, dest=name, help=text)
    add_owner(add_command(commands, "show", "somebody's limits", _show, with_json=True))
    add_command(commands, "list", "everybody's limits", _list, with_json=True)


def add_owner(parser: argparse.ArgumentParser) -> None:
    """Options that name somebody with limits."""
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("key", nargs="?", help="of a key: id (key_...) or public id")
    whose.add_argument("--tenant", help="of a tenant: name or id")
    whose.add_argument("--model", help="of a model, over all tenants")
    whose.add_argument("--gateway", action="store_true", help="of all requests together")


def owner_of(options: argparse.Namespace) -> tuple[LimitScope, str]:
    """As `add_owner` has asked for."""
    if options.key is not None:
        return "key", options.key
    if options.tenant is not None:
        return "tenant", options.tenant
    return ("gateway", "") if options.gateway else ("model", options.model)


def _set(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in LIMIT_NAMES}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise InvalidValue("nothing to set: give a limit, such as --rpm 60")
    with open_registry(options) as control:
        found = service_limits.set_limits(control, *owner_of(options), changes)
    return _print(options, found)


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_limits.show_limits(control, *owner_of(options))
    return _print(options, found)


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        every = service_limits.list_limits(control)
    if options.json:
        print_json([_fields(found) for found in every])
    else:
        rows = [(found.scope, found.owner or "-", found.name, _words(found)) for found in every]
        print_table(("SCOPE", "ID", "NAME", "LIMITS"), rows)
    return 0


def _print(options: argparse.Namespace, found: OwnedLimits) -> int:
    if options.json:
        print_json(_fields(found))
    else:
        limits = {name: _value(found, name) or "unlimited" for name in LIMIT_NAMES}
        words = {name.removesuffix("_nanos"): value for name, value in limits.items()}
        print_fields({found.scope: found.name, **words})
    return 0


def _fields(found: OwnedLimits) -> dict[str, object]:
    limits = {name: getattr(found.limits, name) for name in LIMIT_NAMES}
    return {"scope": found.scope, "id": found.owner, "name": found.name, **limits}


def _value(found: OwnedLimits, name: str) -> int | str:
    """As people write it; 0 or "" where there is no limit."""
    value: int = getattr(found.limits, name)
    return (units(value) if value else "") if name in BUDGETS else value


def _words(found: OwnedLimits) -> str:
    """Such as `rpm 60, tpd 100000`."""
    set_ones = [(OPTIONS[name][0][2:], _value(found, name)) for name in LIMIT_NAMES]
    return ", ".join(f"{word} {value}" for word, value in set_ones if value)
