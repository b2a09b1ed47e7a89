"""`polyhost limits set|show`: requests and tokens a minute, requests at a time, per key."""

import argparse

from gateway import service
from gateway.cli_common import add_command, add_commands, open_registry, print_fields, print_json
from gateway.cli_keys import add_limit_options
from registry.api_keys import KeyRecord
from registry.errors import InvalidValue


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    change = add_command(commands, "set", "change a key's limits", _set, with_json=True)
    change.add_argument("key", help="id (key_...) or public id")
    add_limit_options(change, default=None)
    show = add_command(commands, "show", "a key's limits", _show, with_json=True)
    show.add_argument("key", help="id (key_...) or public id")


def _set(options: argparse.Namespace) -> int:
    given = (options.rpm, options.tpm, options.concurrency)
    if given == (None, None, None):
        raise InvalidValue("nothing to set: give --rpm, --tpm or --concurrency")
    with open_registry(options) as control:
        key = service.set_limits(control, options.key, *given)
    return _print(options, key)


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        key = service.show_key(control, options.key)
    return _print(options, key)


def _print(options: argparse.Namespace, key: KeyRecord) -> int:
    limits = {
        "requests_per_minute": key.limits.requests_per_minute,
        "tokens_per_minute": key.limits.tokens_per_minute,
        "max_concurrency": key.limits.max_concurrency,
    }
    if options.json:
        print_json({"id": key.id, "tenant": key.tenant_name, "name": key.name, **limits})
    else:
        print_fields({name: value or "unlimited" for name, value in limits.items()})
    return 0
