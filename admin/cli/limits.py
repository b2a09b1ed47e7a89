"""`polyhost limits set|show|list`, and `polyhost alerts add|list|rm|test|log`: webhook alerts when
spending reaches a threshold."""

import argparse
from dataclasses import asdict

from admin.cli.common import (
    add_command,
    add_commands,
    add_limit_option,
    call,
    instant,
    note,
    parse_units,
    print_fields,
    print_json,
    show_rows,
    units,
)
from admin.operations import limits
from admin.operations.limits import NamedRule, OwnedLimits
from registry.accounts.quotas import LIMIT_NAMES, LimitScope
from registry.errors import InvalidValue
from registry.money.alerts import Alert

OPTIONS = {
    "requests_per_minute": ("--rpm", "requests per minute"),
    "requests_per_day": ("--rpd", "requests per 24 hours"),
    "tokens_per_minute": ("--tpm", "tokens per minute, prompts and answers together"),
    "tokens_per_day": ("--tpd", "tokens per 24 hours, prompts and answers together"),
    "input_tokens_per_minute": ("--input-tpm", "prompt tokens per minute"),
    "input_tokens_per_day": ("--input-tpd", "prompt tokens per 24 hours"),
    "output_tokens_per_minute": ("--output-tpm", "generated tokens per minute"),
    "output_tokens_per_day": ("--output-tpd", "generated tokens per 24 hours"),
    "max_concurrency": ("--concurrency", "concurrent requests"),
    "max_prompt_tokens": ("--max-prompt", "tokens per prompt"),
    "max_output_tokens": ("--max-output", "tokens per answer"),
    "day_budget_nanos": ("--budget-day", "spending per calendar day (UTC)"),
    "month_budget_nanos": ("--budget-month", "spending per calendar month (UTC)"),
}
BUDGETS = frozenset({"day_budget_nanos", "month_budget_nanos"})
DEFAULT_PERCENTS = "50,80,100"
MAX_LOG = 1000


def configure_limits(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    change = add_command(commands, "set", "set limits; 0 removes a limit", _set, with_json=True)
    add_owner(change)
    for name in LIMIT_NAMES:
        option, summary = OPTIONS[name]
        text = f"{summary}; 0: unlimited"
        kind, metavar = (parse_units, "SUM") if name in BUDGETS else (int, "N")
        change.add_argument(option, type=kind, metavar=metavar, dest=name, help=text)
    add_owner(
        add_command(
            commands,
            "show",
            "show the limits of a key, a tenant, a model or the gateway",
            _show,
            with_json=True,
        )
    )
    add_command(commands, "list", "list all limits that are set", _list_limits, with_json=True)


def add_owner(parser: argparse.ArgumentParser) -> None:
    """Options that name whose limits are meant."""
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("key", nargs="?", help="limits of this key: id (key_...) or public id")
    whose.add_argument("--tenant", help="limits of this tenant: name or id")
    whose.add_argument("--model", help="limits of this model, over all tenants")
    whose.add_argument("--gateway", action="store_true", help="limits of all requests together")


def owner_of(options: argparse.Namespace) -> tuple[LimitScope, str]:
    """The scope and owner given by the options of `add_owner`."""
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
    found = call(options, limits.set_limits, *owner_of(options), changes)
    return _print(options, found)


def _show(options: argparse.Namespace) -> int:
    found = call(options, limits.show_limits, *owner_of(options))
    return _print(options, found)


def _list_limits(options: argparse.Namespace) -> int:
    every = call(options, limits.list_limits)
    return show_rows(
        options,
        every,
        _limit_fields,
        ("SCOPE", "ID", "NAME", "LIMITS"),
        lambda found: (found.scope, found.owner or "-", found.name, _words(found)),
    )


def _print(options: argparse.Namespace, found: OwnedLimits) -> int:
    if options.json:
        print_json(_limit_fields(found))
    else:
        limits = {name: _value(found, name) or "unlimited" for name in LIMIT_NAMES}
        words = {name.removesuffix("_nanos"): value for name, value in limits.items()}
        print_fields({found.scope: found.name, **words})
    return 0


def _limit_fields(found: OwnedLimits) -> dict[str, object]:
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


def configure_alerts(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    new = add_command(
        commands, "add", "call a webhook when spending reaches a threshold", _add, with_json=True
    )
    add_owner(new)
    window = new.add_mutually_exclusive_group(required=True)
    window.add_argument(
        "--day",
        dest="kind",
        action="store_const",
        const="day",
        help="alert on spending per day (UTC)",
    )
    window.add_argument(
        "--month",
        dest="kind",
        action="store_const",
        const="month",
        help="alert on spending per month (UTC)",
    )
    new.add_argument(
        "--webhook",
        required=True,
        metavar="URL",
        help="URL that receives a POST request for each alert",
    )
    new.add_argument(
        "--sum",
        type=parse_units,
        default=0,
        metavar="SUM",
        help="soft budget; requests are not refused (default: the hard budget in force)",
    )
    new.add_argument(
        "--at",
        default=DEFAULT_PERCENTS,
        metavar="PERCENTS",
        help=f"thresholds in percent of the budget (default: {DEFAULT_PERCENTS})",
    )
    add_command(commands, "list", "list alert rules", _list_alerts, with_json=True)
    gone = add_command(commands, "rm", "remove an alert rule", _remove)
    gone.add_argument("id", help="ID of the rule, from `alerts list`")
    test = add_command(commands, "test", "send a test message now", _test)
    test.add_argument("id", help="ID of the rule, from `alerts list`")
    log = add_command(
        commands, "log", "list alerts and their delivery, newest first", _log, with_json=True
    )
    add_limit_option(log, 50)


def _add(options: argparse.Namespace) -> int:
    scope, owner = owner_of(options)
    percents = _percents(options.at)
    found, secret = call(
        options,
        limits.add_alert,
        scope,
        owner,
        options.kind,
        options.sum,
        percents,
        options.webhook,
    )
    if options.json:
        print_json({**_alert_fields(found), "secret": secret})
        return 0
    print_fields({"id": found.rule.id, "name": found.name, "secret": secret})
    note("store the secret now; it is not shown again. The receiver verifies signatures with it")
    return 0


def _list_alerts(options: argparse.Namespace) -> int:
    every = call(options, limits.list_alerts)
    return show_rows(
        options,
        every,
        _alert_fields,
        ("ID", "SCOPE", "NAME", "WINDOW", "OF", "AT (%)", "WEBHOOK"),
        lambda found: (
            found.rule.id,
            found.rule.scope,
            found.name or found.rule.owner or "-",
            found.rule.kind,
            _sum(found),
            ",".join(map(str, found.rule.percents)),
            found.rule.url,
        ),
    )


def _remove(options: argparse.Namespace) -> int:
    call(options, limits.remove_alert, options.id)
    return 0


def _test(options: argparse.Namespace) -> int:
    call(options, limits.send_test, options.id)
    note("the receiver accepted the test message")
    return 0


def _log(options: argparse.Namespace) -> int:
    if not 1 <= options.limit <= MAX_LOG:
        raise InvalidValue(f"--limit must be 1 to {MAX_LOG}")
    every = call(options, limits.alert_log, options.limit)
    return show_rows(
        options,
        every,
        asdict,
        ("ID", "RULE", "AT (%)", "RAISED (UTC)", "TRIES", "STATE"),
        lambda a: (a.id, a.rule_id, a.percent, instant(a.raised_at), a.num_tries, _state(a)),
    )


def _alert_fields(found: NamedRule) -> dict[str, object]:
    return {**asdict(found.rule), "name": found.name, "of_nanos": found.budget_nanos}


def _percents(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InvalidValue(
            "--at needs whole percentages separated by commas, such as 50,80,100"
        ) from error


def _sum(found: NamedRule) -> str:
    soft = "soft" if found.rule.budget_nanos else "hard"
    return f"{units(found.budget_nanos)} ({soft})" if found.budget_nanos else "no budget set"


def _state(alert: Alert) -> str:
    if alert.delivered_at is not None:
        return f"delivered {instant(alert.delivered_at)}"
    if alert.next_try_at is None:
        return f"failed: {alert.last_error}"
    return f"next try {instant(alert.next_try_at)} {alert.last_error}".strip()
