"""The process that compiles constraints and computes masks;
engine/constraints/constraints.py starts it.

Why a process: loading a tokenizer holds the interpreter's lock for most of a second, and among
texts of a few kilobytes some compile for minutes and some overflow the library's stack, which ends
a process (docs/log.md). So a constraint nobody has compiled yet is first tried in a fork, which
inherits the tokenizer and which a timer of CPU time and a limit of memory may end. Only what has
passed is compiled here.

One message at a time, in order; trials go to the tenant that has used least of them. Masks go into
memory shared with the parent, one row a session; the row's number is at hand where this process is
ended from outside, so the parent knows the culprit. Every answer says what CPU time it took: the
parent keeps the accounts (engine/constraints/cpu_shares.py). Imports neither torch nor numpy and
has one thread, as forking needs.
"""

import hashlib
import mmap
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import TypeAlias

import msgspec

from engine.errors import ConstraintBroken, ConstraintRefused, ConstraintSpent
from engine.grammar.messages import (
    HEADER_BYTES,
    Broken,
    Done,
    FromChild,
    GrammarRefused,
    Limits,
    Open,
    Step,
    ToChild,
    TokenizerSource,
    decode_to_child,
    encode,
)
from engine.grammar.structured import Compiler, Grammar, Matcher
from engine.protocol import Constraint

# Some 60 MB each at 50k tokens. Models with the same tokenizer share one.
MAX_TOKENIZERS = 8
MAX_GRAMMARS = 256
MAX_DIGESTS = 1024
MAX_TRIALS = 2
# The library recurses; 12 times the usual stack takes it through what its own limits allow.
STACK_BYTES = 96 << 20
TOO_MUCH = "it takes too much time or memory to compile"


# A digest of tokenizer.json instead of its place.
_CompilerKey: TypeAlias = tuple[bytes, int, tuple[int, ...]]


class ConstraintChild:
    """The sessions of one process. Sessions are numbered by the parent: the row of their mask."""

    def __init__(
        self,
        connection: multiprocessing.connection.Connection,
        memory: mmap.mmap,
        num_rows: int,
        limits: Limits,
    ) -> None:
        self._connection = connection
        view = memoryview(memory)
        self._current = view[:8].cast("q")
        self._masks = view[HEADER_BYTES:]
        self._row_bytes = len(self._masks) // num_rows
        self._limits = limits
        self._digests: OrderedDict[str, bytes] = OrderedDict()
        self._compilers: OrderedDict[_CompilerKey, Compiler] = OrderedDict()
        self._grammars: OrderedDict[tuple[_CompilerKey, Constraint], Grammar] = OrderedDict()
        self._matchers: dict[int, Matcher] = {}
        self._untried: list[Open] = []
        self._trials: dict[multiprocessing.connection.Connection, tuple[int, Open]] = {}
        self._tried_s: defaultdict[str, float] = defaultdict(float)  # while trials wait

    def serve(self) -> None:
        """Until the parent closes the connection."""
        while True:
            for ready in multiprocessing.connection.wait([self._connection, *self._trials]):
                assert isinstance(ready, multiprocessing.connection.Connection)
                if ready is self._connection:
                    try:
                        message = ready.recv_bytes()
                    except (EOFError, OSError):
                        return
                    self._handle(decode_to_child(message))
                else:
                    self._end_trial(ready)
            self._start_trials()

    def _handle(self, message: ToChild) -> None:
        if isinstance(message, Open):
            key = (self._key(message.source), message.constraint)
            if message.trusted or key in self._grammars:
                self._guarded(message.session, message)
            else:
                self._untried.append(message)
        elif isinstance(message, Step):
            for session, token in message.tokens:
                if session in self._matchers:
                    self._guarded(session, token)
        else:
            for session in message.sessions:
                self._matchers.pop(session, None)

    def _send(self, answer: FromChild) -> None:
        self._connection.send_bytes(encode(answer))

    def _guarded(self, session: int, work: Open | int, trial_s: float = 0.0) -> None:
        """Past its limit SIGPROF ends the process, whatever code it is in."""
        self._current[0] = session
        # The process's clock moves by ticks while the timer runs.
        begun_s = time.thread_time() - trial_s
        answer: FromChild
        try:
            if isinstance(work, Open):
                compiler = self._compiler(work.source)
                begun_s = time.thread_time() - trial_s
                signal.setitimer(signal.ITIMER_PROF, 2 * self._limits.compile_s)
                matcher = Matcher(self._grammar(compiler, work), work.output_ids)
                self._matchers[session] = matcher
            else:
                signal.setitimer(signal.ITIMER_PROF, self._limits.step_s)
                matcher = self._matchers[session]
                matcher.accept(work)
            start = session * self._row_bytes
            matcher.mask_into(self._masks[start : start + self._row_bytes])
            answer = Done(session, matcher.finished, time.thread_time() - begun_s)
        except ConstraintRefused as error:
            answer = GrammarRefused(session, str(error), time.thread_time() - begun_s)
        except ConstraintBroken as error:
            self._matchers.pop(session, None)
            spent = isinstance(error, ConstraintSpent)
            worn = isinstance(error, ConstraintSpent) and error.is_shared
            cpu_s = time.thread_time() - begun_s
            answer = Broken(session, str(error), spent, cpu_s, worn)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._current[0] = -1
        self._send(answer)

    def _start_trials(self) -> None:
        while self._untried and len(self._trials) < MAX_TRIALS:
            work = min(self._untried, key=lambda waiting: self._tried_s[waiting.tenant])
            self._untried.remove(work)
            try:
                compiler = self._compiler(work.source)
            except ConstraintRefused as error:
                self._send(GrammarRefused(work.session, str(error)))
                continue
            reader, writer = multiprocessing.connection.Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                self._try(compiler, work.constraint, writer)
            writer.close()
            self._trials[reader] = (pid, work)
        if not self._untried:
            self._tried_s.clear()

    def _try(
        self,
        compiler: Compiler,
        constraint: Constraint,
        writer: multiprocessing.connection.Connection,
    ) -> None:
        """The fork: compile it, say how it went, end."""
        try:
            self._connection.close()  # or the parent would not see this process end
            signal.setitimer(signal.ITIMER_PROF, self._limits.compile_s)
            signal.setitimer(signal.ITIMER_REAL, self._limits.trial_s)
            compiler.compile(constraint)
            writer.send_bytes(b"ok")
        except ConstraintRefused as error:
            writer.send_bytes(b"no" + str(error).encode("utf-8", "replace"))
        finally:
            os._exit(0)

    def _end_trial(self, reader: multiprocessing.connection.Connection) -> None:
        pid, work = self._trials.pop(reader)
        try:
            verdict = reader.recv_bytes()
        except (EOFError, OSError):
            verdict = b"no" + TOO_MUCH.encode()
        reader.close()
        used = os.wait4(pid, 0)[2]
        trial_s = used.ru_utime + used.ru_stime
        if self._untried:
            self._tried_s[work.tenant] += trial_s
        if verdict == b"ok":
            self._guarded(work.session, work, trial_s)
        else:
            reason = verdict[2:].decode("utf-8", "replace")
            self._send(GrammarRefused(work.session, reason, trial_s))

    def _key(self, source: TokenizerSource) -> _CompilerKey:
        digest = self._digests.get(source.tokenizer_json)
        if digest is None:
            try:
                content = Path(source.tokenizer_json).read_bytes()
            except OSError:
                content = source.tokenizer_json.encode()  # making its compiler says what is wrong
            digest = self._digests[source.tokenizer_json] = hashlib.sha256(content).digest()
            if len(self._digests) > MAX_DIGESTS:
                self._digests.popitem(last=False)
        return digest, source.vocab_size, source.eos_ids

    def _compiler(self, source: TokenizerSource) -> Compiler:
        key = self._key(source)
        compiler = self._compilers.pop(key, None)
        if compiler is None:
            path = Path(source.tokenizer_json)
            compiler = Compiler(path, source.vocab_size, source.eos_ids)
            if compiler.mask_bytes > self._row_bytes:
                raise ConstraintRefused("the tokenizer has too many tokens for structured output")
        self._compilers[key] = compiler
        if len(self._compilers) > MAX_TOKENIZERS:
            dropped, _ = self._compilers.popitem(last=False)
            # A grammar holds its tokenizer: each that is made again would stay beside the first.
            for held in [held for held in self._grammars if held[0] == dropped]:
                del self._grammars[held]
        return compiler

    def _grammar(self, compiler: Compiler, work: Open) -> Grammar:
        key = (self._key(work.source), work.constraint)
        grammar = self._grammars.pop(key, None)
        if grammar is None or grammar.worn:
            grammar = compiler.compile(work.constraint)
        self._grammars[key] = grammar
        if len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        return grammar


def main(connection_fd: int, memory_fd: int, num_rows: int, limits: Limits) -> None:
    """Serve until the parent closes the connection."""
    for which, bound in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (bound, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this ends
    connection = multiprocessing.connection.Connection(connection_fd)
    ConstraintChild(connection, mmap.mmap(memory_fd, 0), num_rows, limits).serve()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        msgspec.json.decode(sys.argv[4], type=Limits),
    )
