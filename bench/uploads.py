"""Files and uploads: what a large one takes of the gateway's memory, and of others' time.

    python -m bench.uploads [--size-mb 1024] [--file-mb 512] [--work-dir DIR] [--output FILE]

Starts the product's server without models (gateway and dispatcher in one process) and sends random
bytes from this process, over loopback:

    upload     a file of `--size-mb` in parts of 64 MiB, completed with its MD5
    file       one of `--file-mb` in one request
    read       the content of the first, its digest checked here

Meanwhile a thread asks `GET /health/live` every 20 ms: how long it takes says how long the event
loop was held up. Memory is the most that the process has had resident (VmHWM), told before the
first byte and after the last. It ends with status 1 where the memory is above `--most-mb` or
the bytes are not those that were sent.
"""

import argparse
import hashlib
import http.client
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.machine import facts
from bench.servers import Polyhost, Server
from bench.stats import spread

MIB = 1 << 20
PART_BYTES = 64 * MIB
PIECE_BYTES = MIB
ASK_PAUSE_S = 0.02
BOUNDARY = "bench-uploads"
TENANT = "bench"


class Caller:
    """One tenant's key at one server."""

    def __init__(self, server: Server, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        self._headers = {"authorization": f"Bearer {key}"}

    def json(self, path: str, body: object) -> Any:
        """The answer to a JSON body."""
        headers = {**self._headers, "content-type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), headers)
        return self._answer()

    def send(self, path: str, field: str, source: "Source", num_bytes: int, **more: str) -> Any:
        """The answer to a form with the next bytes of the source."""
        parts = [_field(name, value) for name, value in more.items()]
        head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{field}"; filename="f"'
        begin = ("".join(parts) + head + "\r\n\r\n").encode()
        end = f"\r\n--{BOUNDARY}--\r\n".encode()

        def body() -> Iterator[bytes]:
            yield begin
            yield from source.take(num_bytes)
            yield end

        headers = {
            **self._headers,
            "content-type": f"multipart/form-data; boundary={BOUNDARY}",
            "content-length": str(len(begin) + num_bytes + len(end)),
        }
        self._connection.request("POST", path, body(), headers)
        return self._answer()

    def read(self, path: str) -> str:
        """The SHA-256 of an answer's bytes."""
        self._connection.request("GET", path, headers=self._headers)
        answer, digest = self._connection.getresponse(), hashlib.sha256()
        while piece := answer.read(PIECE_BYTES):
            digest.update(piece)
        return digest.hexdigest()

    def _answer(self) -> Any:
        answer = self._connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {body}")
        return body


class Source:
    """Bytes that are made as they are sent, with what a digest says of all of them."""

    def __init__(self) -> None:
        self._piece = os.urandom(PIECE_BYTES)
        self.sha256, self.md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)

    def take(self, num_bytes: int) -> Iterator[bytes]:
        """The next so many."""
        while num_bytes:
            piece = self._piece[:num_bytes]
            self.sha256.update(piece)
            self.md5.update(piece)
            num_bytes -= len(piece)
            yield piece


class Asking(threading.Thread):
    """Asks whether the process is alive until it is told to stop."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.times_s: list[float] = []

    def run(self) -> None:
        """See the module."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        while not self._over.wait(ASK_PAUSE_S):
            begun_s = time.perf_counter()
            connection.request("GET", "/health/live")
            connection.getresponse().read()
            self.times_s.append(time.perf_counter() - begun_s)

    def stop(self) -> list[float]:
        """What each question took."""
        self._over.set()
        self.join()
        return self.times_s


def most_resident_mb(pid: int) -> float:
    """Of one process since its start, in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    kib = int(status.split("VmHWM:", 1)[1].split()[0])
    return kib * 1024 / 1e6


def measured(server: Server, key: str, size_bytes: int, file_bytes: int) -> dict[str, Any]:
    """All of it."""
    caller, source = Caller(server, key), Source()
    before_mb = most_resident_mb(server.process.pid)
    asking = Asking(server)
    asking.start()
    begun_s = time.perf_counter()
    named = {"filename": "f", "mime_type": "application/octet-stream", "purpose": "user_data"}
    upload = caller.json("/v1/uploads", {"bytes": size_bytes, **named})
    path, part_ids = f"/v1/uploads/{upload['id']}", []
    for at in range(0, size_bytes, PART_BYTES):
        part = caller.send(f"{path}/parts", "data", source, min(PART_BYTES, size_bytes - at))
        part_ids.append(part["id"])
    sent_s = time.perf_counter() - begun_s
    done = caller.json(f"{path}/complete", {"part_ids": part_ids, "md5": source.md5.hexdigest()})
    completed_s = time.perf_counter() - begun_s - sent_s
    begun_s = time.perf_counter()
    digest = caller.read(f"/v1/files/{done['file']['id']}/content")
    read_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    caller.send("/v1/files", "file", Source(), file_bytes, purpose="user_data")
    file_s = time.perf_counter() - begun_s
    return {
        "size_bytes": size_bytes,
        "file_bytes": file_bytes,
        "parts_mb_s": size_bytes / sent_s / 1e6,
        "complete_mb_s": size_bytes / completed_s / 1e6,
        "read_mb_s": size_bytes / read_s / 1e6,
        "file_mb_s": file_bytes / file_s / 1e6,
        "live_s": spread(asking.stop()),
        "before_mb": before_mb,
        "most_mb": most_resident_mb(server.process.pid),
        "is_right": digest == source.sha256.hexdigest(),
    }


def _field(name: str, value: str) -> str:
    return f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size-mb", type=int, default=1024, help="of the upload, in MiB")
    parser.add_argument("--file-mb", type=int, default=512, help="of the file, in MiB")
    parser.add_argument("--most-mb", type=float, default=300.0, help="resident, in MB")
    parser.add_argument("--work-dir", type=Path, help="where the server keeps its data")
    parser.add_argument("--output", type=Path, help="file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
        polyhost = Polyhost(Path(folder) / "data", {"max_body_bytes": MIB})
        polyhost.run("db", "upgrade")
        polyhost.run("tenants", "add", TENANT)
        named = "--tenant", TENANT, "--name", TENANT, "--scopes", "files"
        key = polyhost.run("keys", "create", *named).strip()
        server = polyhost.start().wait_ready("/health/live")
        try:
            found = measured(server, key, options.size_mb * MIB, options.file_mb * MIB)
        finally:
            server.stop()
    result = {"machine": facts(), **found}
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if found["is_right"] and found["most_mb"] <= options.most_mb else 1


if __name__ == "__main__":
    raise SystemExit(main())
