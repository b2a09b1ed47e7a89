"""`polyhost tenants add|list|set|floor|floors`."""

import argparse
from dataclasses import asdict

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    note,
    open_registry,
    parse_size,
    print_json,
    print_table,
    size,
)
from gateway.service import tenants as service_tenants
from registry.tenants import PRIORITIES


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add = add_command(commands, "add", "make a tenant", _add, with_json=True)
    add.add_argument("name")
    add.add_argument("--weight", type=float, default=1.0, help="fair share against others (1)")
    add_command(commands, "list", "all tenants", _list, with_json=True)
    change = add_command(commands, "set", "change a tenant", _set, with_json=True)
    change.add_argument("name", help="name or id")
    change.add_argument("--weight", type=float)
    change.add_argument("--priority", choices=PRIORITIES)
    change.add_argument(
        "--reserved-share",
        type=float,
        metavar="SHARE",
        help="of each worker's places and KV memory, kept free for its requests (0 to 0.5)",
    )
    access = change.add_mutually_exclusive_group()
    access.add_argument(
        "--disable",
        dest="disabled",
        action="store_true",
        default=None,
        help="refuse all its keys",
    )
    access.add_argument("--enable", dest="disabled", action="store_false", default=None)
    floor = add_command(
        commands, "floor", "keep a tenant's models on the device", _floor, with_json=True
    )
    floor.add_argument("name", help="name or id")
    floor.add_argument(
        "size",
        type=parse_size,
        help="so much of its models stays, whatever others load: 20GiB; 0: no floor",
    )
    floor.add_argument("models", nargs="*", metavar="MODEL", help="those that are the tenant's")
    add_command(commands, "floors", "all tenants' floors", _floors, with_json=True)


def _add(options: argparse.Namespace) -> int:
    with open_registry(options, create=True) as control:
        tenant = service_tenants.create_tenant(control, options.name, options.weight)
    if options.json:
        print_json(asdict(tenant))
    else:
        print(tenant.id)
        note(f"next: polyhost keys create --tenant {options.name} --name NAME")
    return 0


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_tenants.list_tenants(control)
    if options.json:
        print_json([asdict(tenant) for tenant in found])
    else:
        print_table(
            ("NAME", "ID", "WEIGHT", "PRIORITY", "RESERVED", "STATE", "CREATED"),
            [
                (
                    tenant.name,
                    tenant.id,
                    f"{tenant.weight:g}",
                    tenant.priority,
                    f"{tenant.reserved_share:g}",
                    "disabled" if tenant.disabled else "active",
                    instant(tenant.created_at),
                )
                for tenant in found
            ],
        )
    return 0


def _set(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        tenant = service_tenants.update_tenant(
            control,
            options.name,
            options.weight,
            options.disabled,
            options.priority,
            options.reserved_share,
        )
    if options.json:
        print_json(asdict(tenant))
    else:
        state = "disabled" if tenant.disabled else "active"
        print(
            f"{tenant.name}: weight {tenant.weight:g}, {tenant.priority}, "
            f"{tenant.reserved_share:g} reserved, {state}"
        )
    return 0


def _floor(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        floor = service_tenants.set_model_floor(control, options.name, options.size, options.models)
    if options.json:
        print_json(asdict(floor))
    elif floor.size_bytes:
        print(f"{options.name}: {size(floor.size_bytes)} of {', '.join(floor.models)} stay")
    else:
        print(f"{options.name}: no floor")
    return 0


def _floors(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_tenants.list_model_floors(control)
        names = {tenant.id: tenant.name for tenant in service_tenants.list_tenants(control)}
    if options.json:
        print_json([asdict(floor) for floor in found])
    else:
        print_table(
            ("TENANT", "ID", "FLOOR", "MODELS"),
            [
                (
                    names.get(floor.tenant_id, ""),
                    floor.tenant_id,
                    size(floor.size_bytes),
                    ", ".join(floor.models),
                )
                for floor in found
            ],
        )
    return 0
