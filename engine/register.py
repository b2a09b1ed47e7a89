"""Registration as a process of its own: folders in, checkpoint packs out, a JSON line a step.

    python -m engine.register --source FOLDER [--source ...] --dest PACKS_DIR [--dtype auto]

On standard output, one object a line: `progress` (phase "check", "probe" or "convert", bytes done
and in all), then for each source either `ready` or `refused` with a stable code and a message for
the operator. Exit status 0 only if every source is ready. Whoever starts it needs no torch.

Nothing is written before the folder is known to be safe and its family to come out right.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from engine.convert import DtypeChoice, inspect, write_pack
from engine.errors import RegistrationRefused
from engine.parity import probe

PROGRESS_INTERVAL_S = 0.1

logger = logging.getLogger(__name__)


class Reporter:
    """Events of one source; progress at most every PROGRESS_INTERVAL_S, phases' ends always."""

    def __init__(self, source: str, out: TextIO) -> None:
        self._source = source
        self._out = out
        self._last_s = 0.0
        self._phase = ""

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """How far a phase is."""
        now_s = time.monotonic()
        due = now_s - self._last_s >= PROGRESS_INTERVAL_S or phase != self._phase
        if due or done_bytes >= total_bytes:
            self._last_s = now_s
            self._phase = phase
            self.event("progress", phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)

    def event(self, event: str, **fields: Any) -> None:
        """One line."""
        line = msgspec.json.encode({"event": event, "source": self._source, **fields})
        self._out.write(line.decode() + "\n")
        self._out.flush()


def register(source: str, dest: Path, dtype: DtypeChoice, out: TextIO) -> bool:
    """Register one folder; True if it is ready. Every outcome is reported."""
    report = Reporter(source, out)
    try:
        candidate = inspect(Path(source).expanduser())
        report.event("progress", phase="probe", done_bytes=0, total_bytes=0)
        parity_error = probe(candidate.blueprint.config)
        pack_dir, index = write_pack(candidate, dest, dtype, report.progress)
    except RegistrationRefused as refusal:
        report.event("refused", code=refusal.code, message=str(refusal))
        return False
    except OSError as error:
        report.event("refused", code="io_error", message=f"{source}: {error}")
        return False
    except Exception as error:  # the process's boundary: one bad folder must not hide the others
        logger.exception("registration of %s failed", source)
        message = f"unexpected {type(error).__name__}: {error} (this is a bug; see the log)"
        report.event("refused", code="internal_error", message=message)
        return False
    report.event(
        "ready",
        pack_dir=str(pack_dir),
        revision=index.revision,
        family=index.family,
        max_context=index.max_context,
        vocab_size=index.vocab_size,
        weight_bytes=index.total_bytes,
        dtype=index.dtype,
        parity_error=parity_error,
    )
    return True


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="python -m engine.register", description=__doc__)
    parser.add_argument("--source", action="append", required=True, help="model folder")
    parser.add_argument("--dest", type=Path, required=True, help="folder for packs")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options = parser.parse_args(arguments)
    dest = options.dest.expanduser().absolute()
    ready = [register(source, dest, options.dtype, out) for source in options.source]
    return 0 if all(ready) else 1


if __name__ == "__main__":
    sys.exit(main())
