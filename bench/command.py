"""What the commands of several programs share: a folder to work in, settings, the result file."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench import processes


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--work-dir`, `--output` and `--setting`."""
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--work-dir", type=Path, help="models, packs, logs; else a temporary one")
    parser.add_argument("--output", type=Path, help="else bench/results/NAME-TIME.json")


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Of the server, by name."""
    return dict(item.split("=", 1) for item in args.setting)


@contextmanager
def working_in(folder: Path | None) -> Iterator[Path]:
    """The folder, made if it is missing, or a temporary one. SIGTERM leaves the block, too."""
    processes.exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        chosen = folder or Path(temporary)
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.resolve()


def keep(result: Mapping[str, object], output: Path | None, name: str) -> None:
    """Write the result file, and say where it is."""
    output = output or Path("bench/results") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}")


def write_whole(folder: Path, texts: Mapping[str, str]) -> None:
    """Files of a folder by name, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        fresh = folder / f"{name}.part"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(folder / name)
