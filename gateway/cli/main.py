"""`polyhost`: the command line. Parses, runs one verb, turns errors into one line and a status.

    serve                                     start the gateway (serve.py)
    models add|list|show|rm|pin|unpin|load|unload
    tenants add|list|set     keys create|list|revoke|rotate     limits set|show
    users add|list|set|rm|passwd                                audit list
    prices set|show          usage export                       db upgrade
    cache stats|purge|show
    why [MODEL|REQUEST_ID]   decisions        what the running server waits for, and did (why.py)
    simulate TRACE                            a workload in modelled time (simulate.py)

Each group is a module with `configure(parser)`, imported only when it is the one asked for:
`polyhost keys list` must not wait for the server's imports. No verb is implemented here; they are
in gateway/service/.

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

from gateway.cli.common import add_common_options
from gateway.config import SettingsError
from registry.errors import InvalidValue, RegistryError


class _Group(Protocol):
    """What a group's module has."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the group's commands or options; each sets `run`, a function of the options."""


GROUPS = {
    "serve": ("gateway.cli.serve", "start the gateway"),
    "models": ("gateway.cli.models", "register and manage hosted models"),
    "tenants": ("gateway.cli.tenants", "who is billed"),
    "keys": ("gateway.cli.keys", "API keys"),
    "limits": ("gateway.cli.limits", "request and token limits of a key"),
    "alerts": ("gateway.cli.alerts", "who is told when spending reaches a sum"),
    "prices": ("gateway.cli.prices", "prices of a model"),
    "plans": ("gateway.cli.plans", "price plans, and what tenants agreed"),
    "invoices": ("gateway.cli.invoices", "a tenant's month"),
    "usage": ("gateway.cli.usage", "what was used and what it costs"),
    "cache": ("gateway.cli.cache", "answers that are kept to be given again"),
    "users": ("gateway.cli.users", "who may see and change what"),
    "audit": ("gateway.cli.audit", "who changed what"),
    "db": ("gateway.cli.db", "the database's schema"),
    "why": ("gateway.cli.why", "why requests wait in the running server"),
    "decisions": ("gateway.cli.why", "what the running server decided, and why"),
    "simulate": ("gateway.cli.simulate", "run a workload in modelled time"),
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
        cause = " ".join(str(getattr(error, "orig", None) or error).split())
        return _complain(f"the database does not answer as it should: {cause}", 1)
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(str(error), 1)
    except UnicodeError as error:
        return _complain(f"that is not text in UTF-8: {error}", 2)
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
