"""`polyhost`: the command line. Parses, runs one verb, turns errors into one line and a status.

    serve                                     start the gateway (cli_serve)
    models add|list|show|rm|pin|unpin|load|unload
    tenants add|list|set     keys create|list|revoke|rotate     limits set|show
    prices set|show          usage export                       db upgrade
    why [MODEL|REQUEST_ID]   decisions        what the running server waits for, and did (cli_why)
    simulate TRACE                            a workload in modelled time (cli_simulate)

Each group is a module with `configure(parser)`, imported only when it is the one asked for:
`polyhost keys list` must not wait for the server's imports. No verb is implemented here; they are
in gateway/service.py.

Exit status: 0 done, 1 it could not be done, 2 the command or a setting makes no sense.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Protocol, cast

from sqlalchemy.exc import SQLAlchemyError

from gateway.cli_common import add_common_options
from gateway.config import SettingsError
from registry.errors import InvalidValue, RegistryError


class _Group(Protocol):
    """What a group's module has."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the group's commands or options; each sets `run`, a function of the options."""


GROUPS = {
    "serve": ("gateway.cli_serve", "start the gateway"),
    "models": ("gateway.cli_models", "register and manage hosted models"),
    "tenants": ("gateway.cli_tenants", "who is billed"),
    "keys": ("gateway.cli_keys", "API keys"),
    "limits": ("gateway.cli_limits", "request and token limits of a key"),
    "prices": ("gateway.cli_prices", "prices of a model"),
    "usage": ("gateway.cli_usage", "what was used and what it costs"),
    "db": ("gateway.cli_db", "the database's schema"),
    "why": ("gateway.cli_why", "why requests wait in the running server"),
    "decisions": ("gateway.cli_why", "what the running server decided, and why"),
    "simulate": ("gateway.cli_simulate", "run a workload in modelled time"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = build_parser(arguments).parse_args(arguments)
        status = int(options.run(options))
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: --help is 0, a mistake is 2
        return stop.code if isinstance(stop.code, int) else 1
    except (InvalidValue, SettingsError) as error:
        return _complain(str(error), 2)
    except RegistryError as error:
        return _complain(str(error), 1)
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        return _complain(f"the database does not answer as it should: {cause}", 1)
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)
    return status


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser; only the group that `arguments` names has its commands."""
    parser = argparse.ArgumentParser(
        prog="polyhost", description="Host many models for many tenants on few devices."
    )
    parser.add_argument("--version", action="version", version=metadata.version("polyhost"))
    add_common_options(parser)
    groups = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in GROUPS.items():
        group = groups.add_parser(name, help=summary, description=summary)
        if name in arguments:
            cast(_Group, importlib.import_module(module)).configure(group)
    return parser


def _complain(message: str, status: int) -> int:
    print(f"polyhost: {message}", file=sys.stderr)
    return status
