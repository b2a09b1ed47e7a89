"""What a worker has imported is never collected again; in a process of its own, for it stays so."""

import subprocess
import sys

CODE = """
import gc
import torch, transformers
from engine.worker.garbage import settle
settle()
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert len(gc.get_objects()) < 1_000, len(gc.get_objects())
"""


def test_imports_are_frozen() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
