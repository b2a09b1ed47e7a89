"""A model hub over HTTP: searches, a revision's commit and files, a file's bytes from any offset.

Registration's first step where the source is a hub id. What can be had from `huggingface_hub` is:
its session (proxies, certificates, offline mode), its token (HF_TOKEN, or that of `hf auth login`),
its endpoint (HF_ENDPOINT). Its downloader is not used (2.4.0 read): it writes to a file of
a new random name, which it deletes on failure and which kill -9 leaves behind, so nothing is ever
resumed; it checks sizes but no hash; it writes whatever a server sends; its calls for lists have no
time-out; and files may come by another protocol (xet) past the mirror that was named. Here:

- every answer is bounded in size, redirects in number, and a transfer in how slow it may be;
- redirects stay on http(s), never from https down to http, and the token goes to the endpoint only;
- what may go better next time is DownloadInterrupted, what will not is RegistrationRefused.

Knows nothing of what a model is (`hub_models.py` reads what is said of it), of which files are
wanted, or of the disk (`download.py`).
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import OfflineModeIsEnabled

from engine.errors import DownloadInterrupted, RegistrationRefused
from engine.registration.hub_models import HubModel, read_model

MAX_REDIRECTS = 5
MAX_JSON_BYTES = 32 << 20
MAX_LISTED_FILES = 20_000
MAX_PAGES = 1_000
MAX_FILE_BYTES = 1 << 42
MAX_FOUND = 100
"""Models of one search: what a hub puts on one page."""
_SEARCH_FIELDS = (
    *("cardData", "config", "downloads", "gated", "gguf", "library_name", "likes"),
    *("pipeline_tag", "safetensors", "tags"),
)

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9._-]{1,96}|[A-Za-z0-9._-]{1,96}")
_TOKEN = re.compile(r"[!-~]+")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_NEXT_LINK = re.compile(r'<([^>]+)>\s*;\s*rel="next"')
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubLimits:
    """How patient a download is.

    timeout_s       for a connection, and for the next bytes of a transfer
    stall_s         a transfer must bring `stall_bytes` in so long, or it counts as cut off
    attempts        tries in a row that brought no byte
    pause_s         before the second of them; doubles
    """

    timeout_s: float = 30.0
    stall_s: float = 60.0
    stall_bytes: int = 64 << 10
    attempts: int = 5
    pause_s: float = 1.0


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit. `sha256` of a large one (LFS), else `blob`, git's own hash of it."""

    path: str
    size: int
    blob: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Body:
    """An answer's bytes: they begin at `start`, which is 0 where the server knows no ranges."""

    start: int
    chunks: Iterator[bytes]


class Hub:
    """One hub, as the environment names it."""

    def __init__(
        self,
        limits: HubLimits | None = None,
        endpoint: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or HubLimits()
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._sleep = sleep
        self._clock = clock
        self._headers = {"user-agent": "polyhost", "accept-encoding": "identity"}
        token = get_token()
        if token and not _TOKEN.fullmatch(token):
            # Sent on, it would stand in the complaint of the library.
            raise RegistrationRefused(
                "hub_denied",
                "the hub token (hub_token, HF_TOKEN, or that of `hf auth login`) contains "
                "invalid characters: set it again",
            )
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    def commit(self, repo: str, revision: str) -> tuple[str, HubModel]:
        """The commit a branch, tag or commit stands for now, and what the hub says of the model."""
        check_repo(repo)
        url = f"{self._endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}"
        answer, _ = self.retried(lambda: self._json(url, f"{repo}@{revision}"))
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not _SHA1.fullmatch(commit):
            raise self._refusal("bad_hub", f"returned no commit for {repo}@{revision}")
        return commit, read_model(answer, repo)

    def search(self, words: str, limit: int, author: str = "", task: str = "") -> list[HubModel]:
        """Models whose ids contain the words, those with most downloads first: one page."""
        wanted = {"search": words, "author": author, "pipeline_tag": task}
        query = [(name, value) for name, value in wanted.items() if value]
        query += [("sort", "downloads"), ("direction", "-1"), ("limit", str(limit))]
        query += [("expand", name) for name in _SEARCH_FIELDS]
        url = f"{self._endpoint}/api/models?{urlencode(query)}"
        answer, _ = self.retried(lambda: self._json(url, "a search"))
        if not isinstance(answer, list):
            raise self._refusal("bad_hub", "returned the models found in an unknown format")
        found = [read_model(entry) for entry in answer if isinstance(entry, dict)]
        return [model for model in found if _REPO.fullmatch(model.id)][:limit]

    def files(self, repo: str, commit: str) -> list[HubFile]:
        """All files of a commit."""
        files: list[HubFile] = []
        pages = 0
        url = f"{self._endpoint}/api/models/{repo}/tree/{commit}?recursive=true"
        while url:
            page, following = self.retried(partial(self._json, url, repo))
            if not isinstance(page, list):
                raise self._refusal(
                    "bad_hub", f"returned the file list of {repo} in an unknown format"
                )
            files += [self._file(repo, entry) for entry in page if _is_file(entry)]
            pages += 1  # a list of folders only would have no end either
            if len(files) > MAX_LISTED_FILES or pages > MAX_PAGES:
                raise self._refusal(
                    "bad_hub", f"lists more than {MAX_LISTED_FILES} files of {repo}"
                )
            if following and (urlsplit(following)[:2] != urlsplit(self._endpoint)[:2] or not page):
                raise self._refusal(
                    "bad_hub",
                    f"continues the file list of {repo} on another host: {_host(following)!r}",
                )
            url = following
        return files

    @contextmanager
    def open(self, repo: str, commit: str, path: str, start: int) -> Iterator[Body]:
        """A file's bytes from `start` on. Raises DownloadInterrupted, also while it is read."""
        url = f"{self._endpoint}/{repo}/resolve/{commit}/{quote(path)}"
        with ExitStack() as stack:
            response = self._get(stack, url, f"{path} of {repo}", start)
            yield Body(self._start(response, path, start), self._chunks(response))

    def retried(self, call: Callable[[], T]) -> T:
        """The call's answer; it is tried again while it is interrupted, `attempts` times."""
        pause_s = self.limits.pause_s
        for _ in range(self.limits.attempts - 1):
            try:
                return call()
            except DownloadInterrupted:
                self._sleep(pause_s)
                pause_s *= 2
        return call()

    def _json(self, url: str, what: str) -> tuple[Any, str]:
        """(content, the next page's address or "")."""
        content = bytearray()
        with ExitStack() as stack:
            response = self._get(stack, url, what, 0)
            for chunk in self._chunks(response):
                content += chunk
                if len(content) > MAX_JSON_BYTES:
                    raise self._refusal(
                        "bad_hub", f"sent a response of more than {MAX_JSON_BYTES} bytes"
                    )
            link = _NEXT_LINK.search(response.headers.get("link", ""))
        try:
            return json.loads(content), urljoin(url, link.group(1)) if link else ""
        except (ValueError, RecursionError) as error:
            raise self._refusal(
                "bad_hub", f"sent a response for {what} that is not JSON"
            ) from error

    def _get(self, stack: ExitStack, url: str, what: str, start: int) -> Any:
        """The response at the end of the redirects, its body unread."""
        for _ in range(MAX_REDIRECTS + 1):
            try:
                response = stack.enter_context(
                    get_session().stream(
                        "GET",
                        url,
                        headers=self._headers_for(url, start),
                        timeout=self.limits.timeout_s,
                        follow_redirects=False,
                    )
                )
            except OfflineModeIsEnabled as error:
                raise RegistrationRefused(
                    "hub_offline", "HF_HUB_OFFLINE is set: unset it, or register a local folder"
                ) from error
            except Exception as error:  # httpx's or httpx2's tree, as the hub library's version is
                raise DownloadInterrupted(
                    f"{_host(url)} cannot be reached ({_words(error)})"
                ) from error
            if response.status_code not in _REDIRECTS:
                self._check_status(response, what)
                return response
            location = response.headers.get("location", "")
            try:
                target = urljoin(url, location)
                scheme = urlsplit(target).scheme
            except ValueError as error:
                raise self._refusal(
                    "bad_redirect", f"redirects {what} to an invalid URL: {location[:200]!r}"
                ) from error
            if scheme not in ("http", "https") or (scheme == "http" and url.startswith("https:")):
                shown = f"{scheme}://{_host(target)}"
                text = f"redirects {what} to {shown!r}, which is not allowed"
                raise self._refusal("bad_redirect", text)
            url = target
        raise self._refusal("bad_redirect", f"redirects {what} more than {MAX_REDIRECTS} times")

    def _headers_for(self, url: str, start: int) -> dict[str, str]:
        headers = dict(self._headers)
        if urlsplit(url)[:2] != urlsplit(self._endpoint)[:2]:
            headers.pop("authorization", None)
        if start:
            headers["range"] = f"bytes={start}-"
        return headers

    def _check_status(self, response: Any, what: str) -> None:
        status = int(response.status_code)
        if status in (200, 206):
            return
        if status in _LATER:
            raise DownloadInterrupted(f"{self._shown} answered {what} with status {status}")
        code = response.headers.get("x-error-code", "")
        if code == "RevisionNotFound":
            raise self._refusal("no_revision", f"has no {what}: check --revision")
        if code == "GatedRepo" or status in (401, 403):
            raise self._refusal(
                "hub_denied",
                f"denied access to {what} (status {status}): it is private, gated or missing; "
                "accept its licence on the hub, or set HF_TOKEN (setting hub_token) to a token "
                "that has access",
            )
        if status == 404:
            raise self._refusal("no_repository", f"has no {what}: check the name")
        raise self._refusal("bad_hub", f"answered {what} with status {status}")

    def _start(self, response: Any, path: str, start: int) -> int:
        if response.status_code == 200:
            return 0
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None or int(match.group(1)) != start:
            raise self._refusal(
                "bad_hub", f"was asked for {path} from byte {start} and sent another range"
            )
        return start

    def _chunks(self, response: Any) -> Iterator[bytes]:
        """What comes, as it comes."""
        since_s, brought = self._clock(), 0
        try:
            for chunk in response.iter_raw():
                yield chunk
                brought += len(chunk)
                if self._clock() - since_s >= self.limits.stall_s:
                    if brought < self.limits.stall_bytes:
                        raise DownloadInterrupted(
                            f"{_host(str(response.url))} sent only {brought} bytes in "
                            f"{self.limits.stall_s:.0f} s"
                        )
                    since_s, brought = self._clock(), 0
        except DownloadInterrupted:
            raise
        except Exception as error:  # as in _get
            raise DownloadInterrupted(f"the download was interrupted ({_words(error)})") from error

    def _file(self, repo: str, entry: dict[str, Any]) -> HubFile:
        path, large = entry.get("path"), entry.get("lfs")
        if not isinstance(path, str) or not _is_plain(path):
            raise self._refusal(
                "bad_hub", f"lists a file of {repo} with the invalid name {path!r:.200}"
            )
        size, blob, sha256 = entry.get("size"), str(entry.get("oid")), ""
        if isinstance(large, dict):
            size, sha256 = large.get("size", size), str(large.get("oid") or large.get("sha256"))
        hashed = _SHA256.fullmatch(sha256) if sha256 else _SHA1.fullmatch(blob)
        if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES or hashed is None:
            raise self._refusal("bad_hub", f"lists {path} of {repo} without a valid size and hash")
        return HubFile(path, size, blob, sha256)

    def _refusal(self, code: str, what: str) -> RegistrationRefused:
        return RegistrationRefused(code, f"{self._shown} {what}")

    @property
    def _shown(self) -> str:
        """The endpoint for messages: a mirror's may carry a password."""
        parts = urlsplit(self._endpoint)
        return f"{parts.scheme}://{_host(self._endpoint)}{parts.path}"


def check_repo(repo: str) -> None:
    """Raises RegistrationRefused unless it could be a hub id."""
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise RegistrationRefused("no_repository", f"{repo!r} is not a hub id such as org/name")


def _is_file(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("type") == "file"


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _host(url: str) -> str:
    """Host and port: a password before them and a signature behind are not to be shown."""
    return urlsplit(url).netloc.rpartition("@")[2][:200]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
