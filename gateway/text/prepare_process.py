"""One of a gateway's prepare processes: it renders templates and tokenizes; prepare_pool.py starts
it.

Why a process. A model's small files come from the internet, and they are programs: a template may
loop for ever or make a string of gigabytes, a normalizer may make a text a thousand times longer, a
regular expression may take exponential time, and what the `tokenizers` library cannot allocate ends
a process. Nothing in Python bounds that beside other work. Here each job has so much CPU time
(ITIMER_PROF ends the process, whatever code it is in) and so much memory (RLIMIT_AS); whoever
started the process sees its end, knows the job that it was at, and starts another.

Every model's files are read here, the well-known ones too: from some 50 tokens on, asking takes
less of a gateway's time than the work itself did (docs/gateway.md), and the event loop is rid of
all long ones.
"""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tokenizers import Encoding

from gateway.text.encoder_codec import EncoderCodec, TooLong, load_encoder_codec
from gateway.text.prepare_messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    EncodeChat,
    EncodePairs,
    EncodePrompt,
    EncodeTexts,
    Failed,
    Ids,
    Inputs,
    Job,
    LoadEncoder,
    LoadText,
    Longer,
    Measure,
    PrepareLimits,
    Reply,
    decode_job,
    encode_reply,
)
from gateway.text.templates import TemplateRefused
from gateway.text.tokenization import TextCodec, load_codec

log = logging.getLogger(__name__)

# Prompts beyond it are measured before they are encoded; few that fit are so long.
LONG_CHARS_PER_TOKEN = 6
_PAGE_BYTES = resource.getpagesize()


class Budget:
    """CPU time and memory of what runs now."""

    def __init__(self, limits: PrepareLimits) -> None:
        self._limits = limits
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    @contextlib.contextmanager
    def job(self, num_bytes: int) -> Iterator[None]:
        """Around a job that came in so many bytes."""
        limits = self._limits
        more = limits.memory_bytes + limits.memory_per_byte * num_bytes
        taken = int(os.pread(self._statm, 64, 0).split(b" ", 1)[0]) * _PAGE_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (taken + more, hard))
        seconds = limits.cpu_s + limits.cpu_s_per_byte * num_bytes
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:  # what is left of it would run while the next job comes in
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around reading files, which has a time of its own."""
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, self._limits.load_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, left_s)


class PrepareProcess:
    """The models whose files have been read, least recently used first out, and what is asked of
    them."""

    def __init__(self, budget: Budget, max_codecs: int) -> None:
        self._budget = budget
        self._max_codecs = max_codecs
        self._codecs: OrderedDict[tuple[str, type], TextCodec | EncoderCodec] = OrderedDict()
        self._query: tuple[str, str, int] | None = None
        self._encoding: Encoding | None = None

    def answer(self, body: bytes) -> Reply:
        """Raises MemoryError, and nothing else."""
        try:
            with self._budget.job(len(body)):
                return self._answer(decode_job(body))
        except _SurelyLonger as error:
            return Longer(error.most + 1, is_exact=False)
        except TooLong as error:
            return Longer(error.num_tokens, error.index)
        except TemplateRefused as error:
            return Failed("template", str(error))
        except _Unreadable as error:
            return Failed("files", str(error))
        except (ValueError, RecursionError) as error:
            return Failed("text", str(error))
        except MemoryError:
            raise
        except Exception as error:  # whoever asked must not wait for ever
            log.exception("a prepare process failed")
            return Failed("bug", f"{type(error).__name__}: {error}")

    def _answer(self, job: Job) -> Reply:
        if isinstance(job, LoadText | LoadEncoder):
            return self._load(job)
        if isinstance(job, EncodeTexts):
            encoder = self._encoder(job.folder)
            if job.words:
                return Inputs(encoder.encode_words(job.texts, job.longest))
            return Inputs(encoder.encode(job.texts, job.longest, job.cut))
        if isinstance(job, EncodePairs):
            return self._pairs(self._encoder(job.folder), job)
        codec = self._text(job.folder)
        if isinstance(job, Measure):
            _check(codec, job.texts, job.most)
            return Ids()
        if isinstance(job, EncodePrompt):
            return _ids(codec.encode_prompt(job.text, job.is_bare), "", job.most)
        assert isinstance(job, EncodeChat)
        ids, tail = codec.encode_chat(
            job.messages,
            tools=job.tools,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            check_text=lambda text: _check(codec, [text], job.most),
            values=job.values,
            closes=job.closes,
        )
        return _ids(ids, tail, job.most)

    def _load(self, job: LoadText | LoadEncoder) -> Reply:
        """Read anew, whatever is there: the gateway asks once."""
        kind = TextCodec if isinstance(job, LoadText) else EncoderCodec
        self._codecs.pop((job.folder, kind), None)
        codec = self._text(job.folder) if kind is TextCodec else self._encoder(job.folder)
        try:
            with self._budget.loading():
                return codec.facts()
        except ValueError as error:
            raise _Unreadable(str(error)) from error

    def _pairs(self, codec: EncoderCodec, job: EncodePairs) -> Reply:
        # Its documents come in several jobs, and a few tokens of it can be megabytes of spaces.
        asked = (job.folder, job.query, job.room)
        if self._query != asked or self._encoding is None:
            self._encoding, self._query = codec.query(job.query, job.room), asked
        if len(self._encoding) >= job.room:
            return Longer(len(self._encoding), is_exact=False)
        about = job.documents, job.longest, job.document_tokens
        return Inputs(codec.encode_pairs(self._encoding, *about))

    def _text(self, folder: str) -> TextCodec:
        codec = self._find(folder, TextCodec)
        assert isinstance(codec, TextCodec)
        return codec

    def _encoder(self, folder: str) -> EncoderCodec:
        codec = self._find(folder, EncoderCodec)
        assert isinstance(codec, EncoderCodec)
        return codec

    def _find(self, folder: str, kind: type) -> TextCodec | EncoderCodec:
        codec = self._codecs.get((folder, kind))
        if codec is None:
            while len(self._codecs) >= self._max_codecs:
                self._codecs.popitem(last=False)
            codec = self._codecs[folder, kind] = self._read(Path(folder), kind)
        self._codecs.move_to_end((folder, kind))
        return codec

    def _read(self, folder: Path, kind: type) -> TextCodec | EncoderCodec:
        """Reading a tokenizer takes as much memory again as it leaves in use (55 MiB for one of
        152,000 tokens), and the C library keeps that unless it is told."""
        try:
            with self._budget.loading():
                if kind is TextCodec:
                    return load_codec(folder, self._budget.loading)
                return load_encoder_codec(folder)
        except (OSError, ValueError) as error:
            raise _Unreadable(str(error)) from error
        finally:
            with contextlib.suppress(OSError, AttributeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)


class _SurelyLonger(Exception):
    """A text is more tokens than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most


class _Unreadable(Exception):
    """A model's files are no good."""


def _ids(ids: Sequence[int], tail: str, most: int) -> Reply:
    return Longer(len(ids)) if len(ids) > most else Ids(array("i", ids).tobytes(), tail)


def _check(codec: TextCodec, texts: Sequence[str], most: int) -> None:
    """Long texts are measured first: encoding megabytes that cannot fit would take seconds. Raises
    _SurelyLonger."""
    if sum(map(len, texts)) > LONG_CHARS_PER_TOKEN * most and codec.surely_longer(texts, most):
        raise _SurelyLonger(most)


def _serve(connection: socket.socket, process: PrepareProcess) -> None:
    """Until the other end is closed."""
    while head := _read_exactly(connection, LENGTH_BYTES):
        body = _read_exactly(connection, int.from_bytes(head, "big"))
        try:
            reply, is_last = process.answer(body), False
        except MemoryError:
            reply, is_last = Failed("limit", "more memory than a request may take"), True
        frame = encode_reply(reply)
        if len(frame) > MAX_FRAME_BYTES:
            frame = encode_reply(Failed("files", "its tokens are more than fit into a message"))
        connection.sendall(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        if is_last:
            return


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """Empty where the other end was closed."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            return b""
        done += count
    return bytes(data)


def main(descriptor: int, limits: str, max_codecs: int) -> None:
    """Serve the socket of that number. `limits`: PrepareLimits as JSON."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A service manager tells all processes of a server. This one ends when the gateway has drained.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    budget = Budget(msgspec.json.decode(limits, type=PrepareLimits))
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(ConnectionError):
        _serve(connection, PrepareProcess(budget, max_codecs))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
