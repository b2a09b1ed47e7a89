"""Can a stranger's tokenizer.json be read, and within limits? Asked in a process of its own.

    python -m engine.registration.tokenizer_check FILE CPU_SECONDS MEMORY_BYTES

The file decides how much work its reading is: added tokens go through normalizers, whose regular
expressions may take exponential time and whose replacements may make a text of gigabytes, and what
the library cannot allocate ends the process. So the registration has it read once here, within
limits of CPU time and memory, before it probes or fetches weights. The limits are those of a
gateway that reads a model's files (gateway/text/prepare_messages.py), which reads this one next.
"""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import RegistrationRefused

CPU_S = 10.0
MEMORY_BYTES = 1 << 30
"""Beside what the process has before."""
_UNREADABLE, _SPENT = 3, 4
_MAX_REASON_LEN = 500


def check_readable(path: Path, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
    """Blocks for some tenths of a second. Raises RegistrationRefused: "no_tokenizer" where it
    cannot be read, "unusable_text_files" where it takes more than it may."""
    module = "engine.registration.tokenizer_check"
    done = subprocess.run(
        [sys.executable, "-m", module, str(path), str(cpu_s), str(memory_bytes)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode == _UNREADABLE:
        reason = done.stdout.decode(errors="replace")
        raise RegistrationRefused(
            "no_tokenizer", f"{path} cannot be read ({reason}); download it again"
        )
    if done.returncode < 0 or done.returncode == _SPENT:  # the timer's signal, the library's abort
        raise RegistrationRefused(
            "unusable_text_files",
            f"reading {path} takes more than {cpu_s:g} s of CPU time or {memory_bytes >> 20} MiB "
            "of memory: the file is damaged or hostile; use another revision of the model",
        )
    if done.returncode:
        raise RuntimeError(f"the check of {path} ended with status {done.returncode}")


def main(path: str, cpu_s: float, memory_bytes: int) -> None:
    """Read the file. Ends with _SPENT where memory is up, with _UNREADABLE and the reason on
    standard output where it cannot be read; by a signal where the time is up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        Tokenizer.from_file(path)
    except MemoryError as error:
        raise SystemExit(_SPENT) from error
    except BaseException as error:  # the tokenizers library raises bare Exceptions, and panics
        os.write(sys.stdout.fileno(), str(error)[:_MAX_REASON_LEN].encode(errors="replace"))
        raise SystemExit(_UNREADABLE) from error


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
