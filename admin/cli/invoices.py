"""`polyhost invoices`: one invoice per tenant and month; an issued invoice never changes."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from admin.billing.invoice_document import Document, money, percent
from admin.cli.common import (
    add_command,
    add_commands,
    call,
    instant,
    note,
    open_registry,
    print_fields,
    print_json,
    print_table,
    show_rows,
)
from admin.operations import invoices
from admin.operations.invoices import month_of
from registry.errors import InvalidValue
from registry.money.invoices import InvoiceRecord

FORMS = ("html", "pdf", "json")


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    create = add_command(commands, "create", "issue invoices", _create, with_json=True)
    create.add_argument("--month", required=True, metavar="YYYY-MM", help="calendar month (UTC)")
    create.add_argument("--tenant", metavar="T", help="name or id of the tenant")
    create.add_argument("--all", action="store_true", help="invoice every tenant with charges")
    create.add_argument(
        "--details",
        default="",
        help="address and other details of the tenant, printed on the invoice",
    )
    preview = add_command(
        commands, "preview", "show an invoice without issuing it", _preview, with_json=True
    )
    preview.add_argument("--month", required=True, metavar="YYYY-MM", help="calendar month (UTC)")
    preview.add_argument("--tenant", required=True, metavar="T", help="name or id of the tenant")
    listed = add_command(commands, "list", "list invoices in order of issue", _list, with_json=True)
    listed.add_argument("--tenant", metavar="T", help="only invoices of this tenant: name or id")
    show = add_command(commands, "show", "show an invoice", _show, with_json=True)
    show.add_argument("number", help="number of the invoice")
    export = add_command(commands, "export", "write an invoice to a file", _export)
    export.add_argument("number", help="number of the invoice")
    export.add_argument("--format", choices=FORMS, default="pdf", help="(default: pdf)")
    export.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: standard output)"
    )


def _create(options: argparse.Namespace) -> int:
    if (options.tenant is None) != options.all:
        raise InvalidValue("give either --tenant or --all")
    month = month_of(options.month)
    with open_registry(options) as context:
        if options.all:
            made = invoices.create_all(context, month, options.details)
        else:
            made = [invoices.create_invoice(context, options.tenant, month, options.details)]
    return _print(options, made)


def _preview(options: argparse.Namespace) -> int:
    document = call(options, invoices.preview_invoice, options.tenant, month_of(options.month))
    return _print_document(options, document)


def _list(options: argparse.Namespace) -> int:
    found = call(options, invoices.list_invoices, options.tenant)
    return _print(options, found)


def _show(options: argparse.Namespace) -> int:
    _, document = call(options, invoices.get_invoice, options.number)
    return _print_document(options, document)


def _export(options: argparse.Namespace) -> int:
    data = call(options, invoices.render_invoice, options.number, options.format)
    if options.output is None:
        sys.stdout.buffer.write(data)
    else:
        options.output.write_bytes(data)
        note(f"wrote invoice {options.number} to {options.output}")
    return 0


def _print(options: argparse.Namespace, found: list[InvoiceRecord]) -> int:
    return show_rows(
        options,
        found,
        lambda one: {**asdict(one), "document": json.loads(one.document)},
        ("NUMBER", "TENANT", "MONTH", "TOTAL", "CURRENCY", "ISSUED (UTC)"),
        lambda one: (
            one.number,
            one.tenant_name,
            instant(one.began_at)[:7],
            money(one.total_nanos, 2),
            one.currency,
            instant(one.issued_at),
        ),
    )


def _print_document(options: argparse.Namespace, document: Document) -> int:
    if options.json:
        print_json(asdict(document))
        return 0
    decimals = document.decimals
    rows = [
        (
            line.model,
            line.meter,
            f"{line.quantity} {line.unit}".strip(),
            line.price,
            money(line.amount_nanos, decimals),
            line.note,
        )
        for line in document.lines
    ]
    print_table(("MODEL", "METER", "QUANTITY", "PRICE", "AMOUNT", "NOTE"), rows)
    sums = {
        "number": document.number or "(preview)",
        "tenant": document.tenant_name,
        "period": f"{document.first_day} to {document.last_day}",
        "net": money(document.net_rounded_nanos, decimals),
        "tax": f"{money(document.tax_nanos, decimals)} ({percent(document.tax_bp)} %)",
        "total": f"{money(document.total_nanos, decimals)} {document.currency}",
        "requests": document.num_postings,
    }
    print()
    print_fields(sums)
    return 0
