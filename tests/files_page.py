"""docs/files.md, made from the sources: every file with the first sentence of its description.

`make files` (`python -m tests.files_page`) writes the page; tests/test_docs.py fails where the page
is older than the sources. Only the standard library is used, so any Python 3.11 can run it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
PACKAGES = ("gateway", "engine", "kernels", "registry", "migrations", "admin", "bench")
COMMENT_MARKS = {".lua": "--", ".h": "//", ".cpp": "//"}
HEAD = """# Files

`make files` writes this page from the first sentence of each file's description; do not edit it.
[architecture.md](architecture.md) explains how the folders fit together.
"""


def description(path: Path) -> str:
    """A file's module docstring, or the comment it begins with; empty where it has neither."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    mark = COMMENT_MARKS[path.suffix]
    lines = []
    for line in text.splitlines():
        if not line.startswith(mark):
            break
        lines.append(line.removeprefix(mark).strip())
    return "\n".join(lines)


def first_sentence(text: str) -> str:
    """The first sentence of a description, on one line."""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]


def folders() -> Iterator[Path]:
    """Every folder of the packages that holds listed files, parents before children."""
    for package in PACKAGES:
        inside = (path for path in sorted((ROOT / package).rglob("*")) if path.is_dir())
        for folder in (ROOT / package, *inside):
            if listed(folder):
                yield folder


def listed(folder: Path) -> list[Path]:
    """The files of a folder that the page lists."""
    kinds = {".py", *COMMENT_MARKS}
    return sorted(path for path in folder.iterdir() if path.suffix in kinds)


def render() -> str:
    """The page's text."""
    parts = [HEAD]
    for folder in folders():
        parts.append(f"\n## {folder.relative_to(ROOT).as_posix()}\n")
        files = listed(folder)
        face = folder / "__init__.py"
        if face in files and (about := first_sentence(description(face))):
            parts.append(f"\n{about}\n")
        rows = [
            f"- `{path.name}`: {first_sentence(description(path))}\n"
            for path in files
            if path != face
        ]
        parts += ["\n", *rows] if rows else []
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
