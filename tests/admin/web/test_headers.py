"""Static files: what a browser may keep of them for ever, and whole."""

from pathlib import Path

import pytest
from starlette.middleware.gzip import GZipMiddleware
from starlette.testclient import TestClient

from admin.web.headers import COMMON, FOR_EVER, OF_PARTS, SecurityHeaders, VersionedFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.js").write_text("let a = 1;\n" * 500)
    return tmp_path


def test_a_file_is_sent_whole(folder: Path) -> None:
    """One entity tag stands for a file and for the file compressed: a part of the one behind a
    part of the other would be kept for ever."""
    files = VersionedFiles(folder)
    client = TestClient(GZipMiddleware(files))
    at = f"/{files.version}/app.js"
    first = client.get(at, headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    assert "accept-ranges" not in first.headers
    rest = client.get(at, headers={"range": "bytes=20-", "if-range": first.headers["etag"]})
    assert rest.status_code == 200
    assert rest.text == first.text
    known = client.get(at, headers={"if-none-match": first.headers["etag"]})
    assert (known.status_code, known.headers["cache-control"]) == (304, FOR_EVER)


def test_documents_have_all_policies_and_parts_those_that_concern_them(folder: Path) -> None:
    (folder / "icon.svg").write_text("<svg/>")
    files = VersionedFiles(folder)
    client = TestClient(SecurityHeaders(files))
    script = client.get(f"/{files.version}/app.js").headers
    assert OF_PARTS.items() <= dict(script).items()
    assert not (COMMON.keys() - OF_PARTS.keys()) & script.keys()
    picture = client.get(f"/{files.version}/icon.svg").headers
    assert COMMON.items() <= dict(picture).items(), "it may be opened by itself"


def test_what_changed_since_the_start_is_not_kept(folder: Path) -> None:
    """An upgrade under a running server: the digest in the address is of the files before it."""
    files = VersionedFiles(folder)
    client = TestClient(files)
    assert client.get(f"/{files.version}/app.js").headers["cache-control"] == FOR_EVER
    (folder / "app.js").write_text("let a = 2;\n")
    (folder / "new.js").write_text("let b = 1;\n")
    for name in ("app.js", "new.js"):
        answer = client.get(f"/{files.version}/{name}")
        assert answer.status_code == 200
        assert "cache-control" not in answer.headers
