"""`polyhost alerts add|list|rm|test|log`: who is told when spending reaches a sum."""

import argparse
from dataclasses import asdict

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    note,
    open_registry,
    parse_units,
    print_fields,
    print_json,
    print_table,
    units,
)
from gateway.cli.limits import add_owner, owner_of
from gateway.service import alerts as service_alerts
from gateway.service.alerts import NamedRule
from registry.alerts import Alert
from registry.errors import InvalidValue

DEFAULT_PERCENTS = "50,80,100"
MAX_LOG = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    new = add_command(commands, "add", "tell a webhook of spending", _add, with_json=True)
    add_owner(new)
    window = new.add_mutually_exclusive_group(required=True)
    window.add_argument("--day", dest="kind", action="store_const", const="day", help="by the day")
    window.add_argument(
        "--month", dest="kind", action="store_const", const="month", help="by the month (UTC)"
    )
    new.add_argument("--webhook", required=True, metavar="URL", help="where to POST")
    new.add_argument(
        "--sum",
        type=parse_units,
        default=0,
        metavar="SUM",
        help="a soft budget: nothing is refused; without it, the hard budget's",
    )
    new.add_argument(
        "--at", default=DEFAULT_PERCENTS, metavar="PERCENTS", help=f"of it ({DEFAULT_PERCENTS})"
    )
    add_command(commands, "list", "who is told of what", _list, with_json=True)
    gone = add_command(commands, "rm", "tell no more", _remove)
    gone.add_argument("id", help="as `alerts list` shows it")
    test = add_command(commands, "test", "send a message now, as if it had been reached", _test)
    test.add_argument("id", help="as `alerts list` shows it")
    log = add_command(commands, "log", "what was reached, newest first", _log, with_json=True)
    log.add_argument("--limit", type=int, default=50, metavar="N", help="at most (50)")


def _add(options: argparse.Namespace) -> int:
    scope, owner = owner_of(options)
    percents = _percents(options.at)
    with open_registry(options) as control:
        found, secret = service_alerts.add_alert(
            control, scope, owner, options.kind, options.sum, percents, options.webhook
        )
    if options.json:
        print_json({**_fields(found), "secret": secret})
        return 0
    print_fields({"id": found.rule.id, "whose": found.name, "secret": secret})
    note("the secret is shown this once: the receiver checks signatures with it")
    return 0


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        every = service_alerts.list_alerts(control)
    if options.json:
        print_json([_fields(found) for found in every])
        return 0
    print_table(
        ("ID", "SCOPE", "NAME", "WINDOW", "OF", "AT (%)", "WEBHOOK"),
        [
            (
                found.rule.id,
                found.rule.scope,
                found.name or found.rule.owner or "-",
                found.rule.kind,
                _sum(found),
                ",".join(map(str, found.rule.percents)),
                found.rule.url,
            )
            for found in every
        ],
    )
    return 0


def _remove(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        service_alerts.remove_alert(control, options.id)
    return 0


def _test(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        service_alerts.send_test(control, options.id)
    note("it was taken")
    return 0


def _log(options: argparse.Namespace) -> int:
    if not 1 <= options.limit <= MAX_LOG:
        raise InvalidValue(f"--limit must be 1 to {MAX_LOG}")
    with open_registry(options) as control:
        every = service_alerts.alert_log(control, options.limit)
    if options.json:
        print_json([asdict(alert) for alert in every])
        return 0
    print_table(
        ("ID", "RULE", "AT (%)", "RAISED (UTC)", "TRIES", "STATE"),
        [(a.id, a.rule_id, a.percent, instant(a.raised_at), a.num_tries, _state(a)) for a in every],
    )
    return 0


def _fields(found: NamedRule) -> dict[str, object]:
    return {**asdict(found.rule), "name": found.name, "of_nanos": found.budget_nanos}


def _percents(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InvalidValue("--at takes whole percents with commas, such as 50,80,100") from error


def _sum(found: NamedRule) -> str:
    soft = "soft" if found.rule.budget_nanos else "hard"
    return f"{units(found.budget_nanos)} ({soft})" if found.budget_nanos else "no budget is set"


def _state(alert: Alert) -> str:
    if alert.delivered_at is not None:
        return f"told {instant(alert.delivered_at)}"
    if alert.next_try_at is None:
        return f"given up: {alert.last_error}"
    return f"next try {instant(alert.next_try_at)} {alert.last_error}".strip()
