"""Every command that a page shows is one that the command line has."""

import html
import re
import shlex

import pytest

from admin.cli.main import build_parser
from tests.conftest import ROOT

TEMPLATES = ROOT / "admin" / "templates"
A_WORD = "2026-11-01"
"""In place of what a page fills in: a day, and a name too."""
_WITHIN = re.compile(r'" ~ [^~()]+ ~ "')
_AT_THE_END = re.compile(r'" ~ [^~()]+\)')
_COMMAND = re.compile(r'polyhost [a-z]+ (?:\{\{[^}]*\}\}|[^<"])*')
_FILLED = re.compile(r"\{\{[^}]*\}\}|YYYY-MM-DD")


def shown() -> list[str]:
    found = set[str]()
    for template in sorted(TEMPLATES.glob("*.html")):
        text = _WITHIN.sub(A_WORD, template.read_text(encoding="utf-8"))
        text = _AT_THE_END.sub(f'{A_WORD}")', text)
        for match in _COMMAND.finditer(text):
            filled = html.unescape(_FILLED.sub(A_WORD, match[0])).replace("YYYY-MM", "2026-11")
            found.add(filled.strip())
    return sorted(found)


def test_there_are_commands() -> None:
    assert len(shown()) > 10


@pytest.mark.parametrize("command", shown())
def test_the_command_line_has_it(command: str) -> None:
    arguments = shlex.split(command)[1:]
    try:
        options = build_parser(arguments).parse_args(arguments)
    except SystemExit:
        pytest.fail(command)
    assert callable(options.run)
