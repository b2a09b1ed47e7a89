"""A model hub on this machine: the protocol of the real one, and every way it can go wrong.

/api/models?search=..., /api/models/{repo}/revision/{rev}, /api/models/{repo}/tree/{rev} in pages,
/{repo}/resolve/{rev}/{file}
with ETag, X-Repo-Commit, X-Linked-Size and X-Linked-Etag, a redirect of large files to another
address (/lfs/..., as the real one's CDN), and ranges. `sent` counts the bytes of each file's body
that went out, `asked` keeps the requests.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".bin")
PAGE_ENTRIES = 3
BLOCK = 16 << 10


@dataclass
class Faults:
    """What goes wrong; all off by default.

    cuts       after so many bytes of bodies of the named file the connection is dropped, once each
    wrong      names whose bytes differ from what the list says
    status     path prefix -> status to answer with, so many times
    """

    cuts: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    status: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    surplus: int = 0
    redirect: str = ""
    next_page: str = ""
    no_ranges: bool = False
    stall: threading.Event | None = None
    hold: dict[str, threading.Event] = field(default_factory=dict)
    pace_s: float = 0.0


class HubServer(ThreadingHTTPServer):
    """Serves the folders it was given, each as the one commit of a repository."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, str] = {}
        self.cards: dict[str, dict[str, Any]] = {}
        self.faults = Faults()
        self.sent: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []
        self.tokens: list[tuple[str, str]] = []
        self.count_lock = threading.Lock()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, repo: str, folder: Path, commit: str = COMMIT, **card: Any) -> None:
        """Host a folder. `card`: what the API says of it beside its id."""
        self.cards[repo] = card
        self.repos[repo] = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.commits[repo] = commit

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """All routes."""
        hub, parts = self.server, urlsplit(self.path)
        path = unquote(parts.path)
        with hub.count_lock:
            hub.asked.append((path, self.headers.get("range", "")))
            hub.tokens.append((path, self.headers.get("authorization", "")))
        for prefix, (status, times, code) in list(hub.faults.status.items()):
            if path.startswith(prefix) and times > 0:
                hub.faults.status[prefix] = (status, times - 1, code)
                self._plain(status, b"{}", {"X-Error-Code": code} if code else {})
                return
        if path == "/api/models":
            self._search(dict(parse_qsl(parts.query)))
            return
        for repo, files in hub.repos.items():
            commit = hub.commits[repo]
            if path.startswith(f"/api/models/{repo}/revision/"):
                wanted = path.rpartition("/revision/")[2]
                if wanted not in ("main", commit, "v1"):
                    self._plain(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                    return
                card = hub.cards.get(repo, {})
                self._json({"id": repo, "sha": commit, "siblings": [], **card})
                return
            if path == f"/api/models/{repo}/tree/{commit}":
                self._tree(files, parts.query)
                return
            if path.startswith(f"/{repo}/resolve/{commit}/"):
                self._resolve(repo, files, path.removeprefix(f"/{repo}/resolve/{commit}/"))
                return
            if path.startswith(f"/lfs/{repo}/"):
                self._body(files, path.removeprefix(f"/lfs/{repo}/"), {})
                return
        self._plain(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _search(self, asked: dict[str, str]) -> None:
        """By id, author and task; the most downloads first, whatever `expand` wants to see."""
        found = [
            {"id": repo, "modelId": repo, **card}
            for repo, card in self.server.cards.items()
            if asked.get("search", "").lower() in repo.lower()
            and repo.startswith(asked.get("author", ""))
            and card.get("pipeline_tag", "")
            == asked.get("pipeline_tag", card.get("pipeline_tag", ""))
        ]
        found.sort(key=lambda each: -int(each.get("downloads", 0)))
        self._json(found[: int(asked["limit"])])

    def _tree(self, files: dict[str, bytes], query: str) -> None:
        entries = [_entry(name, content) for name, content in files.items()]
        entries += [{"type": "directory", "path": "onnx", "oid": "0" * 40, "size": 0}]
        entries += self.server.faults.entries
        start = int(query.rpartition("cursor=")[2]) if "cursor=" in query else 0
        headers = {}
        if start + PAGE_ENTRIES < len(entries):
            path = urlsplit(self.path).path
            following = f"{self.server.url}{path}?recursive=true&cursor={start + PAGE_ENTRIES}"
            headers["Link"] = f'<{self.server.faults.next_page or following}>; rel="next"'
        self._json(entries[start : start + PAGE_ENTRIES], headers)

    def _resolve(self, repo: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            self._plain(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": self.server.commits[repo], "ETag": f'"{_blob(files[name])}"'}
        if not name.endswith(LARGE):
            self._body(files, name, headers)
            return
        sha256 = hashlib.sha256(files[name]).hexdigest()
        headers |= {"X-Linked-Size": str(len(files[name])), "X-Linked-Etag": f'"{sha256}"'}
        target = self.server.faults.redirect or f"{self.server.url}/lfs/{repo}/{name}?signed=1"
        self._plain(302, b"", {**headers, "Location": target})

    def _body(self, files: dict[str, bytes], name: str, headers: dict[str, str]) -> None:
        faults, content = self.server.faults, files[name]
        if name in faults.wrong:
            content = bytes([content[0] ^ 1]) + content[1:]
        start = 0
        asked = self.headers.get("range", "")
        status = 200
        if asked and not faults.no_ranges:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        part = content[start:] + b"x" * faults.surplus
        self.send_response(status)
        self._headers({**headers, "Content-Length": str(len(part))})
        cuts = faults.cuts.get(name)
        left = cuts.pop(0) if cuts else len(part)
        for offset in range(0, len(part), BLOCK):
            block = part[offset : offset + min(BLOCK, left)]
            self.wfile.write(block)
            with self.server.count_lock:
                self.server.sent[name] += len(block)
            left -= len(block)
            if left <= 0 and offset + len(block) < len(part):
                self.wfile.flush()
                self.close_connection = True
                return
            if faults.stall is not None:
                faults.stall.wait(30)
            if name in faults.hold:
                faults.hold[name].wait(30)
            if faults.pace_s:
                threading.Event().wait(faults.pace_s)

    def _json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self._plain(200, json.dumps(content).encode(), headers or {})

    def _plain(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self._headers({**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _headers(self, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = _blob(content)
    if name.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        # The oid of a large file is that of its pointer.
        entry |= {"oid": "1" * 40, "xetHash": "2" * 64}
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running one."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
