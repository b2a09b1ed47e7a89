"""The engine's end of the process that computes masks: started on demand, listened to, restarted.

Lives here: the child's life, the pipe, the masks in shared memory. Does not: sessions, and what an
end of the child means to them (constraints.py); what runs in the child (engine/grammar/child.py).

A thread of its own writes to the pipe, which holds some 200 kB or 280 messages each way: who writes
to a full one waits, for ever if the child has stopped, or itself waits for its answers to be read.
"""

import contextlib
import logging
import mmap
import multiprocessing.connection
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from engine.grammar import HEADER_BYTES, FromChild, Limits, ToChild, decode_from_child, encode

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]

# What is still to be written, oldest first; None: no more. Sessions bound it: each owes one answer.
_Outbox: TypeAlias = queue.SimpleQueue[bytes | None]


class ConstraintProcess:
    """One child and the masks it fills, int32 [num_rows, num_words]."""

    def __init__(self, num_rows: int, num_words: int, limits: Limits) -> None:
        self._num_rows = num_rows
        self._limits = limits
        self._descriptor = os.memfd_create("constraint-masks")
        os.ftruncate(self._descriptor, HEADER_BYTES + num_rows * num_words * 4)
        self._memory = mmap.mmap(self._descriptor, 0)
        masks = torch.frombuffer(self._memory, dtype=torch.int32, offset=HEADER_BYTES)
        self.masks = masks.view(num_rows, num_words)
        self._current = torch.frombuffer(self._memory, dtype=torch.int64, count=1)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: multiprocessing.connection.Connection | None = None
        self._outbox: _Outbox = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        """Idempotent. Takes milliseconds here; the child is ready some 0.3 s later."""
        if self._child is not None:
            return
        self._current[0] = -1
        self._pipe, theirs = multiprocessing.connection.Pipe()
        command = [
            sys.executable,
            "-c",
            # The same code as here, wherever it lies.
            f"import runpy, sys; sys.path.insert(0, {str(_ROOT)!r});"
            "runpy.run_module('engine.grammar.child', "
            "run_name='__main__', alter_sys=True)",
            *(str(theirs.fileno()), str(self._descriptor), str(self._num_rows)),
            msgspec.json.encode(self._limits).decode(),
        ]
        passed = (theirs.fileno(), self._descriptor)
        self._child = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
        theirs.close()
        self._outbox = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=_write, args=(self._pipe, self._outbox), name="constraint-writer", daemon=True
        )
        self._writer.start()

    def send(self, message: ToChild) -> None:
        """Starts the child if need be. If it dies of the message, `receive` will tell."""
        self.start()
        self._outbox.put(encode(message))

    def receive(self, timeout_s: float = 0.0) -> list[FromChild] | None:
        """The answers that are there, waiting so long for the first; None: the child has ended.

        After None all sessions are gone, and the next `send` starts another child.
        """
        answers: list[FromChild] = []
        if self._pipe is None:
            return answers
        try:
            while self._pipe.poll(0.0 if answers else timeout_s):
                answers.append(decode_from_child(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            return answers or None  # what was answered before the end comes first
        return answers

    def reap(self) -> tuple[int, int]:
        """After None: the session the child was working on (-1: none), and its exit status."""
        session = int(self._current[0])
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1.0)
        self.kill()
        status = self._child.returncode
        self._child = None
        self._close_pipe()
        logger.warning("constraint process ended with %d during session %d", status, session)
        return session, status

    def kill(self) -> None:
        """End the child now; `receive` tells None then."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def close(self) -> None:
        """End the child and give everything back."""
        self.kill()
        self._child = None
        self._close_pipe()
        os.close(self._descriptor)

    def _close_pipe(self) -> None:
        """After the child's end, which ends a write that waits."""
        if self._writer is not None:
            self._outbox.put(None)
            self._writer.join()
            self._writer = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def _write(pipe: multiprocessing.connection.Connection, outbox: _Outbox) -> None:
    """The writer's thread."""
    while (message := outbox.get()) is not None:
        try:
            pipe.send_bytes(message)
        except OSError:  # the child has ended: what is left would have ended with it
            return
