"""`polyhost usage export|verify|show`, and `rebuild|check|keep|correct` of the ledger.

The span is half-open, [--from, --to): exports of consecutive spans hold every posting once. The
formats are defined in export_rows.py, focus.py and export_parquet.py.
"""

import argparse
import json
import sys
from pathlib import Path

from admin.billing import export_file
from admin.billing.export_file import PROOF_SUFFIX, Proof
from admin.billing.usage_export import ExportOrder
from admin.cli.common import (
    Commands,
    add_command,
    add_commands,
    add_date_option,
    call,
    note,
    open_registry,
    parse_units,
    print_json,
    print_table,
    units,
)
from admin.context.operator_context import OperatorContext
from admin.operations import usage
from registry.errors import InvalidValue
from registry.money.corrections import Right
from registry.money.exports import Scope

FORMATS = ("csv", "jsonl", "parquet", "focus")
_FAR_FUTURE = float(2**53)


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    export = add_command(commands, "export", "export usage, one row per request", _export)
    _add_scope(export)
    export.add_argument("--format", choices=FORMATS, default="csv", help="(default: csv)")
    export.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: standard output)"
    )
    export.add_argument(
        "--resume", action="store_true", help="continue an interrupted export to FILE"
    )
    export.add_argument(
        "--after",
        default="",
        metavar="TOKEN",
        help="continue after an earlier export: its `after` token",
    )
    export.add_argument(
        "--through",
        type=int,
        metavar="N",
        help="export the same ledger state as an earlier export: its `through` number",
    )
    configure_ledger(commands)
    verify = add_command(commands, "verify", "verify an exported file against the ledger", _verify)
    verify.add_argument("file", type=Path, help="the exported file")
    show = add_command(commands, "show", "show totals", _show, with_json=True)
    _add_scope(show)
    show.add_argument(
        "--by",
        choices=tuple(usage.BY),
        action="append",
        default=None,
        help="group by this; may be repeated (default: tenant and model)",
    )


def _add_scope(parser: argparse.ArgumentParser) -> None:
    add_date_option(parser, "--from", "from_at", "from this ISO date or time on (UTC)", default=0.0)
    add_date_option(
        parser, "--to", "to_at", "before this ISO date or time (UTC)", default=_FAR_FUTURE
    )
    parser.add_argument("--tenant", metavar="T", help="only this tenant: name or id")
    parser.add_argument("--key", metavar="KEY", help="only this key: id or public id")
    parser.add_argument("--model", metavar="NAME", help="only this model")


def _scope(options: argparse.Namespace, context: OperatorContext) -> Scope:
    return usage.scope_of(
        context, options.from_at, options.to_at, options.tenant, options.key, options.model
    )


def _export(options: argparse.Namespace) -> int:
    if options.output is None and options.resume:
        raise InvalidValue("--resume needs --output FILE")
    if options.resume and options.format == "parquet":
        raise InvalidValue(
            "an interrupted Parquet export cannot be resumed: export it again without --resume"
        )
    if options.output is not None and options.after:
        raise InvalidValue("--after works on standard output only: use --resume for a file")
    with open_registry(options) as context:
        order = usage.order_export(
            context, options.format, _scope(options, context), options.through
        )
        if options.output is None:
            stream = sys.stdout.buffer
            proof, token = usage.export_stream(context, order, stream, options.after)
            stream.flush()
            content = {
                "num_rows": proof.num_rows,
                "cost_nanos": proof.cost_nanos,
                "sha256": proof.sha256,
                "after": token,
                "through": order.through_seq,
            }
            note(json.dumps(content))
            return 0
        return _export_file(context, order, options)


def _export_file(context: OperatorContext, order: ExportOrder, options: argparse.Namespace) -> int:
    if options.resume:
        earlier = export_file.interrupted_order(options.output)
        if earlier is None:
            raise InvalidValue(
                f"no interrupted export to {options.output} exists: leave out --resume"
            )
        if (earlier.format, earlier.scope) != (order.format, order.scope):
            raise InvalidValue(
                "the interrupted export had other options: repeat the options you gave then"
            )
        order = earlier
    proof = usage.export_file_to(context, order, options.output)
    note(
        f"wrote {_summary(proof)} to {options.output}, proof in {options.output.name}{PROOF_SUFFIX}"
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    proof = call(options, usage.verify_export, options.file)
    print(f"{options.file.name} matches the ledger: {_summary(proof)}")
    return 0


def _show(options: argparse.Namespace) -> int:
    by = list(dict.fromkeys(options.by or ["tenant", "model"]))
    with open_registry(options) as context:
        found = usage.usage_totals(context, _scope(options, context), by)
        currency = context.settings.currency
    if options.json:
        print_json(found)
        return 0
    heads = (*(name.upper() for name in by), "REQUESTS", "PROMPT", "CACHED", "COMPLETION")
    rows = [
        (*(str(value) for value in list(row.values())[:-1]), units(int(str(row["cost_nanos"]))))
        for row in found
    ]
    print_table((*heads, f"COST {currency}"), rows)
    return 0


def _summary(proof: Proof) -> str:
    return f"{proof.num_rows} rows, {units(proof.cost_nanos)} {proof.order.currency}"


def configure_ledger(commands: Commands) -> None:
    """Into the group `usage`."""
    add_command(commands, "rebuild", "recompute the roll-ups from the postings", _rebuild)
    add_command(commands, "check", "check that the roll-ups agree with the postings", _check)
    keep = add_command(commands, "keep", "delete old postings; the roll-ups stay", _keep)
    add_date_option(
        keep,
        "--from",
        "from_at",
        "keep postings from this ISO date or time on (UTC)",
        required=True,
    )
    correct = add_command(
        commands, "correct", "correct a request's usage or cost by adding a posting", _correct
    )
    correct.add_argument("request", metavar="REQUEST_ID", help="the `id` of the response")
    correct.add_argument("--cost", type=parse_units, metavar="UNITS", help="correct cost")
    for name in ("prompt", "cached", "completion"):
        correct.add_argument(f"--{name}-tokens", type=int, metavar="N", help="correct number")


def _rebuild(options: argparse.Namespace) -> int:
    with open_registry(options) as context:
        note(f"recomputed the roll-ups from {usage.rebuild_rollups(context)} postings")
    return 0


def _check(options: argparse.Namespace) -> int:
    state = call(options, usage.check_ledger)
    note(f"the roll-ups agree with the postings; {state.num_behind} postings are not added yet")
    return 0


def _keep(options: argparse.Namespace) -> int:
    with open_registry(options) as context:
        note(f"deleted {usage.keep_usage_from(context, options.from_at)} postings")
    return 0


def _correct(options: argparse.Namespace) -> int:
    right = Right(
        options.cost, options.prompt_tokens, options.cached_tokens, options.completion_tokens
    )
    made = call(options, usage.correct_usage, options.request, right)
    note(f"posted {made.request_id}: adds {units(made.cost_nanos)} to the cost of {made.corrects}")
    return 0
