"""A site for each file of this room, and a browser where there is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.browser import NO_BROWSER, Browser, chromium_path, running_browser
from tests.admin.provider import Provider, running_provider
from tests.admin.site import Site, running_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The operator's pages over a registry of this file's own; the owner is `ann`."""
    folder: Path = tmp_path_factory.mktemp("site")
    with running_site(folder) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; the test is skipped where there is none."""
    executable = chromium_path()
    if executable is None:
        pytest.skip(NO_BROWSER)
    with running_browser(executable) as running:
        yield running


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    """An identity provider on loopback."""
    with running_provider() as running:
        yield running
