"""`polyhost invoices`: a tenant's month, issued once and for ever."""

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from gateway.billing.invoice import Document, money, percent
from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    note,
    open_registry,
    print_fields,
    print_json,
    print_table,
)
from gateway.service import invoices as service_invoices
from gateway.service.control import Control
from gateway.service.invoices import Month, NothingOwed, month_of
from registry.errors import InvalidValue
from registry.invoices import InvoiceRecord

FORMS = ("html", "pdf", "json")


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    create = add_command(commands, "create", "issue invoices", _create, with_json=True)
    create.add_argument("--month", required=True, metavar="YYYY-MM")
    create.add_argument("--tenant", metavar="T")
    create.add_argument("--all", action="store_true", help="all tenants that owe something")
    create.add_argument("--details", default="", help="the tenant's address and the like, lines")
    preview = add_command(commands, "preview", "what would stand on it", _preview, with_json=True)
    preview.add_argument("--month", required=True, metavar="YYYY-MM")
    preview.add_argument("--tenant", required=True, metavar="T")
    listed = add_command(commands, "list", "invoices in order of issue", _list, with_json=True)
    listed.add_argument("--tenant", metavar="T", help="only this tenant's")
    show = add_command(commands, "show", "what stands on one", _show, with_json=True)
    show.add_argument("number")
    export = add_command(commands, "export", "one as a file", _export)
    export.add_argument("number")
    export.add_argument("--format", choices=FORMS, default="pdf")
    export.add_argument("--output", type=Path, metavar="FILE", help="(standard output)")


def _create(options: argparse.Namespace) -> int:
    if (options.tenant is None) != options.all:
        raise InvalidValue("either --tenant or --all")
    month = month_of(options.month)
    with open_registry(options) as control:
        if options.all:
            made = _create_all(control, month, options.details)
        else:
            made = [
                service_invoices.create_invoice(control, options.tenant, month, options.details)
            ]
    return _print(options, made)


def _create_all(control: Control, month: Month, details: str) -> list[InvoiceRecord]:
    """Who used nothing since the last one does not keep the others from theirs."""
    made = []
    for tenant in service_invoices.tenants_to_bill(control, month):
        with suppress(NothingOwed):
            made.append(service_invoices.create_invoice(control, tenant.id, month, details))
    return made


def _preview(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        document = service_invoices.preview_invoice(
            control, options.tenant, month_of(options.month)
        )
    return _print_document(options, document)


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_invoices.list_invoices(control, options.tenant)
    return _print(options, found)


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        _, document = service_invoices.get_invoice(control, options.number)
    return _print_document(options, document)


def _export(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        data = service_invoices.render_invoice(control, options.number, options.format)
    if options.output is None:
        sys.stdout.buffer.write(data)
    else:
        options.output.write_bytes(data)
        note(f"{options.number} in {options.output}")
    return 0


def _print(options: argparse.Namespace, found: list[InvoiceRecord]) -> int:
    if options.json:
        print_json([{**asdict(one), "document": json.loads(one.document)} for one in found])
        return 0
    rows = [
        (
            one.number,
            one.tenant_name,
            instant(one.began_at)[:7],
            money(one.total_nanos, 2),
            one.currency,
            instant(one.issued_at),
        )
        for one in found
    ]
    print_table(("NUMBER", "TENANT", "MONTH", "TOTAL", "CURRENCY", "ISSUED (UTC)"), rows)
    return 0


def _print_document(options: argparse.Namespace, document: Document) -> int:
    if options.json:
        print_json(asdict(document))
        return 0
    told = document.decimals
    rows = [
        (
            line.model,
            line.meter,
            f"{line.quantity} {line.unit}".strip(),
            line.price,
            money(line.amount_nanos, told),
            line.note,
        )
        for line in document.lines
    ]
    print_table(("MODEL", "METER", "QUANTITY", "PRICE", "AMOUNT", ""), rows)
    sums = {
        "number": document.number or "(preview)",
        "tenant": document.tenant_name,
        "period": f"{document.first_day} to {document.last_day}",
        "net": money(document.net_rounded_nanos, told),
        "tax": f"{money(document.tax_nanos, told)} ({percent(document.tax_bp)} %)",
        "total": f"{money(document.total_nanos, told)} {document.currency}",
        "requests": document.num_postings,
    }
    print()
    print_fields(sums)
    return 0
