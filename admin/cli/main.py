"""`polyhost`: the command line. Parses, runs one operation, turns errors into a line and a status.

`GROUPS` lists the commands with the module of each; `polyhost COMMAND --help` says the rest.

A module is imported only when its command is the one asked for: `polyhost keys list` must not wait
for the server's imports. No operation is implemented here; they are in admin/operations/.

Exit status: 0 success, 1 the command failed, 2 the command line or a setting is invalid.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from sqlalchemy.exc import SQLAlchemyError

from admin.cli.common import add_common_options
from gateway.settings.config import SettingsError
from registry.errors import InvalidValue, RegistryError

# Command -> its module, which is imported only when the command is run; what configures its parser
# (a function that adds the group's commands or options, each of which sets `run`); a summary.
GROUPS = {
    "serve": ("server", "configure_serve", "start the gateway"),
    "models": ("models", "configure", "register and manage hosted models"),
    "workers": ("workers", "configure", "show, drain and restart the server's workers"),
    "servers": ("servers", "configure", "certificates of several servers with one dispatcher"),
    "tenants": ("accounts", "configure_tenants", "manage tenants and their models' floors"),
    "keys": ("keys", "configure", "manage API keys"),
    "limits": (
        *("limits", "configure_limits"),
        "limits and budgets of keys, tenants, models and the gateway",
    ),
    "alerts": (
        *("limits", "configure_alerts"),
        "webhook alerts when spending reaches a threshold",
    ),
    "prices": ("prices", "configure_prices", "set and show the list prices of models"),
    "plans": ("prices", "configure_plans", "price plans and the tenants that have them"),
    "invoices": ("invoices", "configure", "issue, list and export monthly invoices"),
    "usage": ("usage", "configure", "export, verify and correct usage and its cost"),
    "cache": ("observe", "configure_cache", "inspect and purge the answer cache"),
    "users": ("accounts", "configure_users", "users of the operator's pages and their roles"),
    "audit": ("observe", "configure_audit", "show who changed what"),
    "db": ("server", "configure_db", "manage the database schema"),
    "why": ("observe", "configure_why", "show why requests wait in the running server"),
    "decisions": ("observe", "configure_why", "show what the running server decided, and why"),
    "simulate": ("server", "configure_simulate", "simulate a workload"),
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
        return _complain(
            f"database error: {cause}; check the database and the setting database_url", 1
        )
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(str(error), 1)
    except UnicodeError as error:
        return _complain(f"the input is not valid UTF-8 text: {error}", 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)
    return status


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser; only the group that `arguments` names has its commands."""
    parser = argparse.ArgumentParser(
        prog="polyhost", description="Host many models for many tenants on a few devices."
    )
    parser.add_argument("--version", action="version", version=metadata.version("polyhost"))
    add_common_options(parser)
    groups = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, configure, summary) in GROUPS.items():
        group = groups.add_parser(name, help=summary, description=summary)
        if name in arguments:
            getattr(importlib.import_module(f"admin.cli.{module}"), configure)(group)
    return parser


def _complain(message: str, status: int) -> int:
    print(f"polyhost: {message}", file=sys.stderr)
    return status
