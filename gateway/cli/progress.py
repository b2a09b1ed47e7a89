"""How the command line shows a registration: what it will take, and how far it is."""

import sys

from gateway.cli.common import size
from gateway.registration.register_process import RegisterEvent
from gateway.registration.registrar import Progress


def progress_text(phase: str, done_bytes: int, total_bytes: int) -> str:
    """How far a phase is."""
    if total_bytes <= 0:
        return phase
    return f"{phase} {100 * done_bytes // total_bytes} % of {size(total_bytes)}"


def preflight_text(found: RegisterEvent) -> str:
    """Shown before anything large is fetched or written."""
    fetch = f"{size(found.download_bytes)} to fetch, " if found.download_bytes else ""
    return (
        f"{found.family}, {size(found.weight_bytes)} of weights in memory, context "
        f"{found.max_context}; {fetch}{size(found.pack_bytes)} of disk for the pack, "
        f"{size(found.free_bytes)} free"
    )


class ProgressPrinter:
    """One line that is written over on a terminal; a line a phase elsewhere. On standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def show(self, progress: Progress) -> None:
        """Called for every event of the registration."""
        if progress.preflight is not None:
            self.end()
            print(f"{progress.model}: {preflight_text(progress.preflight)}", file=sys.stderr)
            self._last = ""
            return
        text = progress_text(progress.phase, progress.done_bytes, progress.total_bytes)
        if self._terminal:
            width = max(len(self._last), len(text))
            print(f"\r{text.ljust(width)}", end="", file=sys.stderr, flush=True)
            self._last = text
        elif progress.phase != self._last:
            print(f"{progress.model}: {text}", file=sys.stderr, flush=True)
            self._last = progress.phase

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self._last:
            print(file=sys.stderr)
