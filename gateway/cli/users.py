"""`polyhost users add|list|set|rm|passwd|bind|unbind`.

Passwords are asked for, or read from standard input.
"""

import argparse
import getpass
import sys
from dataclasses import asdict

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    open_registry,
    print_json,
    print_table,
)
from gateway.service import identities
from gateway.service import users as service_users
from registry.errors import InvalidValue
from registry.users import INSTALLATION, ROLES, UserRecord

NO_ROLE = "none"


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add = add_command(commands, "add", "a new user, with a role", _add, with_json=True)
    add.add_argument("name")
    add.add_argument("--role", choices=ROLES, required=True)
    add.add_argument("--tenant", default="", help="the role is for this tenant only: name or id")
    add_command(commands, "list", "users and their roles", _list, with_json=True)
    change = add_command(commands, "set", "another role, or let in or not", _set, with_json=True)
    change.add_argument("name")
    change.add_argument("--role", choices=(*ROLES, NO_ROLE), help="none takes it away")
    change.add_argument("--tenant", default="", help="the role is for this tenant only: name or id")
    state = change.add_mutually_exclusive_group()
    state.add_argument("--disable", action="store_true", help="refuse the user from now on")
    state.add_argument("--enable", action="store_true", help="let the user in again")
    remove = add_command(commands, "rm", "remove a user", _rm)
    remove.add_argument("name")
    password = add_command(commands, "passwd", "another password; sessions end", _passwd)
    password.add_argument("name")
    bind = add_command(commands, "bind", "who the identity provider says the user is", _bind)
    unbind = add_command(commands, "unbind", "no longer; sessions end", _unbind)
    for each in (bind, unbind):
        each.add_argument("name")
        each.add_argument("--issuer", default="", help="the provider; that of the settings")
    bind.add_argument("subject", help="the claim `sub` of the user's tokens")


def _add(options: argparse.Namespace) -> int:
    password = _ask_password()
    with open_registry(options, create=True) as control:
        user = service_users.create_user(
            control, options.name, password, options.role, options.tenant
        )
    return _print(options, [user])


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_users.list_users(control)
    return _print(options, found)


def _set(options: argparse.Namespace) -> int:
    switched = options.disable or options.enable
    if options.role is None and not switched:
        raise InvalidValue("nothing to set: give --role, --disable or --enable")
    if options.tenant and options.role is None:
        raise InvalidValue("--tenant says what --role is for: give a role, or none")
    with open_registry(options) as control:
        if options.role is not None:
            role = None if options.role == NO_ROLE else options.role
            user = service_users.set_role(control, options.name, role, options.tenant)
        if switched:
            user = service_users.set_user_disabled(control, options.name, options.disable)
    return _print(options, [user])


def _rm(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        user = service_users.remove_user(control, options.name)
    print(f"{user.name} is removed")
    return 0


def _passwd(options: argparse.Namespace) -> int:
    password = _ask_password()
    with open_registry(options) as control:
        user = service_users.set_password(control, options.name, password)
    print(f"{user.name} has another password")
    return 0


def _bind(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = identities.bind(control, options.name, options.subject, options.issuer)
    print(f"{options.name} is {found.subject} of {found.issuer}")
    return 0


def _unbind(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        user = identities.unbind(control, options.name, options.issuer)
    print(f"{user.name} is bound no longer, and all sessions have ended")
    return 0


def _ask_password() -> str:
    """Never an argument: those are seen in lists of processes and kept in histories."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass("password: ")
    if getpass.getpass("once more: ") != password:
        raise InvalidValue("these are two different passwords")
    return password


def _print(options: argparse.Namespace, found: list[UserRecord]) -> int:
    if options.json:
        print_json([asdict(user) for user in found])
    else:
        print_table(
            ("NAME", "ROLES", "STATE", "CREATED (UTC)"),
            [
                (
                    user.name,
                    _roles(user),
                    "disabled" if user.disabled else "active",
                    instant(user.created_at),
                )
                for user in found
            ],
        )
    return 0


def _roles(user: UserRecord) -> str:
    """Such as `viewer, admin of acme`."""
    words = [
        role if tenant_id == INSTALLATION else f"{role} of {user.tenant_names[tenant_id]}"
        for tenant_id, role in user.roles.items()
    ]
    return ", ".join(words) or "-"
