"""`polyhost usage rebuild|check|keep|correct`: the ledger itself, for operators."""

import argparse

from gateway.cli.common import (
    Commands,
    add_command,
    note,
    open_registry,
    parse_instant,
    parse_units,
    units,
)
from gateway.service import ledger as service_ledger
from registry.corrections import Right


def configure(commands: Commands) -> None:
    """Into the group `usage`."""
    add_command(commands, "rebuild", "sum the roll-ups anew from the postings", _rebuild)
    add_command(commands, "check", "compare roll-ups with postings", _check)
    keep = add_command(commands, "keep", "delete older postings; the roll-ups stay", _keep)
    keep.add_argument(
        "--from", dest="from_at", type=parse_instant, required=True, metavar="DATE", help="ISO, UTC"
    )
    correct = add_command(commands, "correct", "put a posting right by another one", _correct)
    correct.add_argument("request", metavar="REQUEST_ID")
    correct.add_argument("--cost", type=parse_units, metavar="UNITS", help="what it should cost")
    for name in ("prompt", "cached", "completion"):
        correct.add_argument(f"--{name}-tokens", type=int, metavar="N")


def _rebuild(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        note(f"{service_ledger.rebuild_rollups(control)} postings summed")
    return 0


def _check(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        state = service_ledger.check_ledger(control)
    note(f"roll-ups and postings agree; {state.num_behind} postings are still to be added")
    return 0


def _keep(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        note(f"{service_ledger.keep_usage_from(control, options.from_at)} postings deleted")
    return 0


def _correct(options: argparse.Namespace) -> int:
    right = Right(
        options.cost, options.prompt_tokens, options.cached_tokens, options.completion_tokens
    )
    with open_registry(options) as control:
        made = service_ledger.correct_usage(control, options.request, right)
    note(f"{made.request_id}: {units(made.cost_nanos)} added to the cost of {made.corrects}")
    return 0
