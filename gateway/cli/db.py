"""`polyhost db upgrade`: makes the schema, or brings it to what this build needs."""

import argparse

from gateway.cli.common import add_command, add_commands, settings_of
from registry import schema
from registry.session import upgrade


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add_command(commands, "upgrade", "bring the database to this build's schema", _upgrade)


def _upgrade(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    upgrade(settings.registry_url)
    print(f"{settings.data_path}: schema {schema.HEAD}")
    return 0
