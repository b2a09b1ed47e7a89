"""`polyhost usage export|verify|show`: what was used, as files and as sums.

The span is half-open, [--from, --to): exports of consecutive spans hold every posting once. What
the formats hold is export_rows.py's, focus.py's and export_parquet.py's to say.
"""

import argparse
import json
import sys
from pathlib import Path

from gateway.billing import export_file
from gateway.billing.export_file import PROOF_SUFFIX, Proof
from gateway.billing.usage_export import ExportOrder
from gateway.cli import ledger as cli_ledger
from gateway.cli.common import (
    add_command,
    add_commands,
    note,
    open_registry,
    parse_instant,
    print_json,
    print_table,
    units,
)
from gateway.service import usage as service_usage
from gateway.service.control import Control
from registry.errors import InvalidValue
from registry.exports import Scope

FORMATS = ("csv", "jsonl", "parquet", "focus")
_FAR_FUTURE = float(2**53)


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    export = add_command(commands, "export", "what was used, one row a request", _export)
    _add_scope(export)
    export.add_argument("--format", choices=FORMATS, default="csv")
    export.add_argument("--output", type=Path, metavar="FILE", help="(standard output)")
    export.add_argument(
        "--resume", action="store_true", help="go on with an interrupted export to FILE"
    )
    export.add_argument(
        "--after", default="", metavar="TOKEN", help="only what lies behind an earlier export"
    )
    export.add_argument(
        "--through",
        type=int,
        metavar="N",
        help="the ledger as it was then, to go on with an earlier export",
    )
    cli_ledger.configure(commands)
    verify = add_command(commands, "verify", "prove a file from the ledger", _verify)
    verify.add_argument("file", type=Path)
    show = add_command(commands, "show", "sums", _show, with_json=True)
    _add_scope(show)
    show.add_argument(
        "--by",
        choices=tuple(service_usage.BY),
        action="append",
        default=None,
        help="may be given several times (tenant and model)",
    )


def _add_scope(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="from_at", type=parse_instant, default=0.0, metavar="DATE", help="ISO, UTC"
    )
    parser.add_argument(
        "--to",
        dest="to_at",
        type=parse_instant,
        default=_FAR_FUTURE,
        metavar="DATE",
        help="ISO, UTC; not included",
    )
    parser.add_argument("--tenant", metavar="T", help="only this tenant's")
    parser.add_argument("--key", metavar="KEY", help="only this key's")
    parser.add_argument("--model", metavar="NAME", help="only of this model")


def _scope(options: argparse.Namespace, control: Control) -> Scope:
    return service_usage.scope_of(
        control, options.from_at, options.to_at, options.tenant, options.key, options.model
    )


def _export(options: argparse.Namespace) -> int:
    if options.output is None and options.resume:
        raise InvalidValue("--resume goes on with a file: --output FILE")
    if options.resume and options.format == "parquet":
        raise InvalidValue(
            "a Parquet file cannot be gone on with (what tells its parts apart comes at its end): "
            "export it again without --resume"
        )
    if options.output is not None and options.after:
        raise InvalidValue("--after is for standard output; --resume goes on with a file")
    with open_registry(options) as control:
        order = service_usage.order_export(
            control, options.format, _scope(options, control), options.through
        )
        if options.output is None:
            stream = sys.stdout.buffer
            proof, token = service_usage.export_stream(control, order, stream, options.after)
            stream.flush()
            told = {
                "num_rows": proof.num_rows,
                "cost_nanos": proof.cost_nanos,
                "sha256": proof.sha256,
                "after": token,
                "through": order.through_seq,
            }
            note(json.dumps(told))
            return 0
        return _export_file(control, order, options)


def _export_file(control: Control, order: ExportOrder, options: argparse.Namespace) -> int:
    if options.resume:
        earlier = export_file.interrupted_order(options.output)
        if earlier is None:
            raise InvalidValue(f"there is no interrupted export to {options.output}")
        if (earlier.format, earlier.scope) != (order.format, order.scope):
            raise InvalidValue("the interrupted export was another one: give its own options")
        order = earlier
    proof = service_usage.export_file_to(control, order, options.output)
    note(f"{_told(proof)} in {options.output}, proof in {options.output.name}{PROOF_SUFFIX}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        proof = service_usage.verify_export(control, options.file)
    print(f"{options.file.name} is what the ledger says: {_told(proof)}")
    return 0


def _show(options: argparse.Namespace) -> int:
    by = list(dict.fromkeys(options.by or ["tenant", "model"]))
    with open_registry(options) as control:
        found = service_usage.usage_totals(control, _scope(options, control), by)
        currency = control.settings.currency
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


def _told(proof: Proof) -> str:
    return f"{proof.num_rows} rows, {units(proof.cost_nanos)} {proof.order.currency}"
