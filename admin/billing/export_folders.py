"""Where exports lie, a folder a job, and what of it may go.

    <data>/exports/<job id>/<file>, <file>.proof.json    when it is whole
                            <file>.part, <file>.part.json   until then

Folders of jobs that are gone or were cancelled are swept by whoever looks. A job is there before
its folder, and whoever works in one whose job is gone lets go of it.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from admin.context.registration_files import LOGS_FOLDER
from gateway.settings.settings import Settings
from registry.money.export_jobs import ExportJob

EXPORTS_FOLDER = "exports"
LOG_FILE = "exports.log"
WATCHER = "export-runner"
"""Threads of this name wait for a runner's end, one each."""
RUNNER = (sys.executable, "-m", "admin.exporting.export_runner")


def folder_of(data_dir: Path, job_id: str) -> Path:
    """One job's."""
    return data_dir / EXPORTS_FOLDER / job_id


def file_of(data_dir: Path, job: ExportJob) -> Path:
    """Its file, whether it is there or not."""
    return folder_of(data_dir, job.id) / job.file_name


def used_bytes(data_dir: Path) -> int:
    """What all exports take together."""
    return sum(map(size_bytes, _entries(data_dir)))


def size_bytes(folder: Path) -> int:
    """What the files in it take."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # what goes in the meantime takes nothing
                total += entry.stat().st_size
    return total


def folders(data_dir: Path) -> frozenset[str]:
    """The jobs that have one."""
    return frozenset(folder.name for folder in _entries(data_dir))


def sweep(data_dir: Path, job_ids: Collection[str]) -> None:
    """Remove the folders of these."""
    for job_id in job_ids:
        shutil.rmtree(folder_of(data_dir, job_id), ignore_errors=True)


def start_runner(settings: Settings) -> None:
    """A process that works on what waits, and lives on when this one ends. Returns at once.

    Of those that this process has started no more live than may work, and one for who asks while
    the others are about to end: asking again and again costs no process each time.
    """
    alive = sum(thread.name == WATCHER for thread in threading.enumerate())
    if alive > settings.max_exports_running:
        return
    log = settings.data_path / LOGS_FOLDER / LOG_FILE
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            RUNNER,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as stream:  # settings have secrets: they are on no command line
        stream.write(msgspec.json.encode(settings))
    threading.Thread(target=process.wait, name=WATCHER, daemon=True).start()


def _entries(data_dir: Path) -> list[Path]:
    try:
        return [path for path in (data_dir / EXPORTS_FOLDER).iterdir() if path.is_dir()]
    except OSError:  # nothing was exported yet
        return []
