"""`polyhost tenants` and `polyhost users`: who uses the server, and who operates it.

Passwords are prompted for, or read from standard input.
"""

import argparse
import getpass
import sys
from dataclasses import asdict

from admin.cli.common import (
    add_command,
    add_commands,
    call,
    instant,
    note,
    open_registry,
    parse_size,
    print_json,
    show_rows,
    size,
)
from admin.operations import tenants, users
from registry.accounts.tenants import PRIORITIES, SERVERS_RETENTION
from registry.accounts.users import INSTALLATION, ROLES, UserRecord
from registry.errors import InvalidValue

NO_ROLE = "none"


def configure_tenants(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add = add_command(commands, "add", "create a tenant", _add_tenant, with_json=True)
    add.add_argument("name", help="name of the tenant")
    add.add_argument(
        "--weight",
        type=float,
        default=1.0,
        help="share of service compared with other tenants (default: 1)",
    )
    _add_internal(add, False)
    add_command(commands, "list", "list all tenants", _list_tenants, with_json=True)
    change = add_command(commands, "set", "change a tenant", _set_tenant, with_json=True)
    change.add_argument("name", help="name or id")
    change.add_argument("--weight", type=float, help="share of service compared with others")
    change.add_argument("--priority", choices=PRIORITIES, help="priority of all its requests")
    change.add_argument(
        "--reserved-share",
        type=float,
        metavar="SHARE",
        help="share of each worker reserved for this tenant, 0 to 0.5",
    )
    change.add_argument(
        "--response-retention-days",
        type=_retention_days,
        metavar="DAYS",
        help="how long its stored responses are kept, 0: nothing is stored, default: as the "
        "setting response_retention_days",
    )
    _add_internal(change, None)
    access = change.add_mutually_exclusive_group()
    access.add_argument(
        "--disable",
        dest="disabled",
        action="store_true",
        default=None,
        help="refuse all requests with its keys",
    )
    access.add_argument(
        "--enable",
        dest="disabled",
        action="store_false",
        default=None,
        help="accept its keys again",
    )
    floor = add_command(
        commands, "floor", "reserve device memory for a tenant's models", _floor, with_json=True
    )
    floor.add_argument("name", help="name or id")
    floor.add_argument(
        "size",
        type=parse_size,
        help="amount that other tenants' loads must not evict, such as 20GiB; 0: no floor",
    )
    floor.add_argument(
        "models", nargs="*", metavar="MODEL", help="models that belong to the tenant"
    )
    add_command(commands, "floors", "list the floors of all tenants", _floors, with_json=True)


def _add_internal(parser: argparse.ArgumentParser, default: bool | None) -> None:
    parser.add_argument(
        "--internal",
        action=argparse.BooleanOptionalAction,
        default=default,
        help="a tenant of the operator's own: the playground uses its keys by default",
    )


def _retention_days(text: str) -> int:
    return SERVERS_RETENTION if text == "default" else int(text)


def _kept(days: int | None) -> str:
    return "" if days is None else f", responses kept {days} days"


def _add_tenant(options: argparse.Namespace) -> int:
    with open_registry(options, create=True) as context:
        tenant = tenants.create_tenant(context, options.name, options.weight, options.internal)
    if options.json:
        print_json(asdict(tenant))
    else:
        print(tenant.id)
        note(f"next: create a key with `polyhost keys create --tenant {options.name} --name NAME`")
    return 0


def _list_tenants(options: argparse.Namespace) -> int:
    found = call(options, tenants.list_tenants)
    return show_rows(
        options,
        found,
        asdict,
        ("NAME", "ID", "WEIGHT", "PRIORITY", "RESERVED", "STATE", "CREATED"),
        lambda tenant: (
            tenant.name,
            tenant.id,
            f"{tenant.weight:g}",
            tenant.priority,
            f"{tenant.reserved_share:g}",
            ("disabled" if tenant.disabled else "active") + (", internal" * tenant.internal),
            instant(tenant.created_at),
        ),
    )


def _set_tenant(options: argparse.Namespace) -> int:
    tenant = call(
        options,
        tenants.update_tenant,
        options.name,
        options.weight,
        options.disabled,
        options.priority,
        options.reserved_share,
        options.internal,
        options.response_retention_days,
    )
    if options.json:
        print_json(asdict(tenant))
    else:
        state = "disabled" if tenant.disabled else "active"
        print(
            f"{tenant.name}: weight {tenant.weight:g}, {tenant.priority}, "
            f"{tenant.reserved_share:g} reserved, {state}{', internal' if tenant.internal else ''}"
            + _kept(tenant.response_retention_days)
        )
    return 0


def _floor(options: argparse.Namespace) -> int:
    floor = call(options, tenants.set_model_floor, options.name, options.size, options.models)
    if options.json:
        print_json(asdict(floor))
    elif floor.size_bytes:
        print(f"{options.name}: floor of {size(floor.size_bytes)} for {', '.join(floor.models)}")
    else:
        print(f"{options.name}: no floor")
    return 0


def _floors(options: argparse.Namespace) -> int:
    with open_registry(options) as context:
        found = tenants.list_model_floors(context)
        names = {tenant.id: tenant.name for tenant in tenants.list_tenants(context)}
    return show_rows(
        options,
        found,
        asdict,
        ("TENANT", "ID", "FLOOR", "MODELS"),
        lambda floor: (
            names.get(floor.tenant_id, ""),
            floor.tenant_id,
            size(floor.size_bytes),
            ", ".join(floor.models),
        ),
    )


def configure_users(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add = add_command(commands, "add", "create a user with a role", _add_user, with_json=True)
    add.add_argument("name", help="name of the user")
    add.add_argument("--role", choices=ROLES, required=True, help="what the user may do")
    add.add_argument("--tenant", default="", help="give the role for this tenant only: name or id")
    add_command(commands, "list", "list users and their roles", _list_users, with_json=True)
    change = add_command(
        commands,
        "set",
        "change a user's role, or disable or enable the user",
        _set_user,
        with_json=True,
    )
    change.add_argument("name", help="name of the user")
    change.add_argument("--role", choices=(*ROLES, NO_ROLE), help="new role; none removes it")
    change.add_argument(
        "--tenant", default="", help="give the role for this tenant only: name or id"
    )
    state = change.add_mutually_exclusive_group()
    state.add_argument("--disable", action="store_true", help="refuse the user from now on")
    state.add_argument("--enable", action="store_true", help="let the user sign in again")
    remove = add_command(commands, "rm", "remove a user", _rm)
    remove.add_argument("name", help="name of the user")
    password = add_command(
        commands, "passwd", "set a new password; ends the user's sessions", _passwd
    )
    password.add_argument("name", help="name of the user")
    add_command(
        commands, "locks", "list who has to wait after failed sign-ins", _locks, with_json=True
    )
    unlock = add_command(commands, "unlock", "forget failed sign-ins", _unlock)
    whom = unlock.add_mutually_exclusive_group(required=True)
    whom.add_argument("name", nargs="?", default="", help="name of the user")
    whom.add_argument("--address", default="", help="IP address that has to wait")
    whom.add_argument("--all", action="store_true", help="all users and addresses")
    bind = add_command(
        commands, "bind", "link a user to an account of the identity provider", _bind
    )
    unbind = add_command(commands, "unbind", "remove that link; ends the user's sessions", _unbind)
    for each in (bind, unbind):
        each.add_argument("name", help="name of the user")
        each.add_argument(
            "--issuer", default="", help="URL of the provider (default: the setting oidc_issuer)"
        )
    bind.add_argument("subject", help="value of the claim `sub` in the user's tokens")


def _add_user(options: argparse.Namespace) -> int:
    password = _ask_password()
    with open_registry(options, create=True) as context:
        user = users.create_user(context, options.name, password, options.role, options.tenant)
    return _print(options, [user])


def _list_users(options: argparse.Namespace) -> int:
    found = call(options, users.list_users)
    return _print(options, found)


def _set_user(options: argparse.Namespace) -> int:
    switched = options.disable or options.enable
    if options.role is None and not switched:
        raise InvalidValue("nothing to set: give --role, --disable or --enable")
    if options.tenant and options.role is None:
        raise InvalidValue("--tenant needs --role: give a role, or none to remove it")
    with open_registry(options) as context:
        if options.role is not None:
            role = None if options.role == NO_ROLE else options.role
            user = users.set_role(context, options.name, role, options.tenant)
        if switched:
            user = users.set_user_disabled(context, options.name, options.disable)
    return _print(options, [user])


def _rm(options: argparse.Namespace) -> int:
    user = call(options, users.remove_user, options.name)
    print(f"removed user {user.name}")
    return 0


def _passwd(options: argparse.Namespace) -> int:
    password = _ask_password()
    user = call(options, users.set_password, options.name, password)
    print(f"changed the password of {user.name}")
    return 0


def _locks(options: argparse.Namespace) -> int:
    found = call(options, users.list_sign_in_locks)
    return show_rows(
        options,
        found,
        asdict,
        ("KIND", "ADDRESS", "USER", "FAILED", "WAIT"),
        lambda lock: (
            *(lock.kind, lock.address or "-", lock.name or "-"),
            *(str(lock.num_failed), f"{lock.wait_s:.0f} s"),
        ),
    )


def _unlock(options: argparse.Namespace) -> int:
    with open_registry(options) as context:
        num_forgotten = users.unlock(context, options.name, options.address)
        left = users.list_sign_in_locks(context)
    print(f"forgot {num_forgotten} counts of failed sign-ins")
    addresses = sorted({lock.address for lock in left if not lock.name})
    if addresses:
        note(f"still locked: {', '.join(addresses)}; see `polyhost users locks`")
    return 0


def _bind(options: argparse.Namespace) -> int:
    found = call(options, users.bind, options.name, options.subject, options.issuer)
    print(f"linked {options.name} to {found.subject} of {found.issuer}")
    return 0


def _unbind(options: argparse.Namespace) -> int:
    user = call(options, users.unbind, options.name, options.issuer)
    print(f"unlinked {user.name} and ended all sessions of this user")
    return 0


def _ask_password() -> str:
    """Never an argument: process lists and shell histories show those."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass("password: ")
    if getpass.getpass("repeat password: ") != password:
        raise InvalidValue("the two passwords differ: try again")
    return password


def _print(options: argparse.Namespace, found: list[UserRecord]) -> int:
    return show_rows(
        options,
        found,
        asdict,
        ("NAME", "ROLES", "STATE", "CREATED (UTC)"),
        lambda user: (
            user.name,
            _roles(user),
            "disabled" if user.disabled else "active",
            instant(user.created_at),
        ),
    )


def _roles(user: UserRecord) -> str:
    """Such as `viewer, admin of acme`."""
    words = [
        role if tenant_id == INSTALLATION else f"{role} of {user.tenant_names[tenant_id]}"
        for tenant_id, role in user.roles.items()
    ]
    return ", ".join(words) or "-"
