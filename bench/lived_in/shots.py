"""Pictures of every page over a data folder that lives, in four widths and both themes.

For each page and width: is nothing wider than the window, does no table break a word, does axe
find nothing. Pages are found as an operator finds them: by the navigation, and one of each list.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Page

from bench.lived_in.traffic import Askers
from bench.lived_in.world import PASSWORD
from bench.servers import Polyhost
from tests.admin.browser import (
    NO_BROWSER,
    SHOTS,
    THEMES,
    WIDTHS,
    Visit,
    chromium_path,
    running_browser,
)

# Small enough that not all models fit: there is something to evict.
SETTINGS = {"device_budget_bytes": 56 << 20, "num_threads": 1}
WARM_UP_MS = 20_000
FURTHER = (
    "/models/mystery-7b",
    "/model/confirm/unload/sherlock",
    "/tenant/add",
    "/key/add",
    "/user/add",
    "/register",
    "/usage?by=tenant",
    "/cache/answers?tenant=acme&model=",
    "/search?q=a",
    "/account",
    "/nowhere",
)


@dataclass(slots=True)
class Faults:
    """What was found, by page."""

    lines: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Print it and keep it."""
        print(f"  {line}", flush=True)
        self.lines.append(line)


def shoot(data_dir: Path, only: Sequence[str], widths: Sequence[int]) -> int:
    """Serve the folder, look at every page; the number of faults. `only`: parts of paths."""
    executable = chromium_path()
    if executable is None:
        sys.exit(NO_BROWSER)
    faults = Faults()
    server = Polyhost(data_dir, SETTINGS).serve()
    manifest = data_dir / "lived-in.json"
    with (
        server.process,
        running_browser(executable) as browser,
        Askers(server.url, manifest),
        browser.open(server.url) as visit,
    ):
        visit.expected = ("404",)
        visit.go("/sign-in")
        _look(visit, "/sign-in", faults, only, widths)
        visit.sign_in("admin", PASSWORD)
        visit.page.wait_for_timeout(WARM_UP_MS)
        for path in _paths(visit.page):
            if not only or any(part in path for part in only):
                visit.go(path)
                _look(visit, path, faults, (), widths)
        visit.check_clean()
    print(f"{len(faults.lines)} faults; pictures in {SHOTS}")
    return len(faults.lines)


def _paths(page: Page) -> Iterator[str]:
    """All pages: those of the navigation, the first and the last of each list, and some more."""
    links = "els => els.map(el => new URL(el.href).pathname + new URL(el.href).search)"
    found = page.eval_on_selector_all(".side nav a", links)
    base = page.url.partition("/admin")[0]
    for path in found:
        yield path.removeprefix("/admin")
        page.goto(base + path)
        below = page.eval_on_selector_all(f"main a[href^='{path}/']", links)
        downloads = re.compile(r"format=|/file|export|/(pdf|json|html)$")
        below = [one for one in below if not downloads.search(one)]
        for one in dict.fromkeys(below[:1] + below[-1:]):
            yield one.removeprefix("/admin")
    yield from FURTHER


def _look(
    visit: Visit, path: str, faults: Faults, only: Sequence[str], widths: Sequence[int]
) -> None:
    if only and not any(part in path for part in only):
        return
    page, name = visit.page, re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")[:60]
    print(path, flush=True)
    SHOTS.mkdir(exist_ok=True)
    for width in widths:
        page.set_viewport_size({"width": width, "height": WIDTHS[width]})
        try:
            visit.check_layout()
        except AssertionError as error:
            faults.note(str(error))
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            target = SHOTS / f"{name}-{width}-{theme}.png"
            page.screenshot(path=target, full_page=True, animations="disabled")
            try:
                visit.check_accessible()
            except AssertionError as error:
                faults.note(f"{path} at {width}, {theme}: {error}")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1440, "height": 900})
