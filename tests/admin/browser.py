"""Chromium, driven by Playwright: what a page may not do, and pictures of what it looks like.

`Browser.open` gives a page on which every violation of the content policy, every error on the
console and every request that leaves the machine is collected; `check_clean` fails on any.

    POLYHOST_TEST_SCREENSHOTS   not empty: pictures go to screenshots/ (ignored by git)

`python -m bench.lived_in DIR --shoot` takes them of every page, with data that lives.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import BrowserContext, Page, sync_playwright

CHROMIUM = "chromium"
NO_BROWSER = "no browser: install Debian's chromium (apt-get install chromium) to run this"
WANTED = "POLYHOST_TEST_SCREENSHOTS"
SHOTS = Path(__file__).resolve().parents[2] / "screenshots"
# As root there is no sandbox; a container's /dev/shm may be too small for a picture.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
WIDTHS = {390: 844, 768: 1024, 1440: 900, 2560: 1440}
SHOT_WIDTHS = (390, 1440)
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`);
});
"""
# Words of a table's cells that begin on one line and end on another. A line may end at a space and
# behind a hyphen; what is longer than a column, such as an id, may be broken anywhere.
_BROKEN_WORDS = """() => {
  const found = new Set();
  for (const cell of document.querySelectorAll(".table td, .table th")) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      for (const match of node.data.matchAll(/(?<![^\\s(-])[A-Za-z0-9]{2,20}(?![^\\s),.;:-])/g)) {
        const range = document.createRange();
        range.setStart(node, match.index);
        range.setEnd(node, match.index + match[0].length);
        const lines = [...range.getClientRects()].filter((box) => box.width > 0);
        if (lines.some((box) => Math.abs(box.top - lines[0].top) > 2)) found.add(match[0]);
      }
    }
  }
  return [...found];
}"""


def chromium_path() -> str | None:
    """Where the browser is; None where there is none."""
    return shutil.which(CHROMIUM) or shutil.which("chromium-browser")


@dataclass
class Visit:
    """A page with what went wrong on it."""

    page: Page
    base: str
    troubles: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """Parts of console lines that the test provokes."""

    def go(self, path: str) -> None:
        """To a page below /admin."""
        self.page.goto(f"{self.base}/admin{path}")

    def type_into(self, selector: str, text: str) -> None:
        """Keys, once the page has moved the focus to `selector`: earlier ones would be lost."""
        self.page.wait_for_selector(f"{selector}:focus")
        self.page.keyboard.type(text)

    def sign_in(self, user: str, password: str) -> None:
        """By the form."""
        self.go("/sign-in")
        self.page.fill("#f-name", user)
        self.page.fill("#f-password", password)
        self.page.click("main button")
        self.page.wait_for_url(lambda url: "/sign-in" not in url)

    def check_clean(self) -> None:
        """Nothing was blocked, nothing failed, nothing left the machine."""
        violations = self.page.evaluate("window.violations")
        assert violations == [], violations
        found = [line for line in self.troubles if not any(e in line for e in self.expected)]
        assert found == []

    def check_accessible(self) -> None:
        """axe finds nothing serious or critical."""
        found = Axe().run(self.page).response["violations"]
        told = [
            f"{each['id']}: {node['html'][:160]}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]
        assert told == [], "\n".join(told)

    def check_layout(self) -> None:
        """Nothing is wider than the window, and no table breaks a word."""
        wide = self.page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
        at = f"{self.page.url} at {self.page.evaluate('innerWidth')}"
        assert wide <= 0, f"{at}: {wide} px wider than the window"
        broken = self.page.evaluate(_BROKEN_WORDS)
        assert broken == [], f"{at}: broken words {broken}"

    def shoot(self, name: str) -> None:
        """The layout at all widths, and pictures in two and both themes if they are wanted; the
        page is as before afterwards."""
        before = self.page.viewport_size
        themes = THEMES if os.environ.get(WANTED) else ()
        for width, height in WIDTHS.items():
            self.page.set_viewport_size({"width": width, "height": height})
            self.check_layout()
            for theme in themes if width in SHOT_WIDTHS else ():
                self.page.emulate_media(color_scheme=theme)
                SHOTS.mkdir(exist_ok=True)
                path = SHOTS / f"{name}-{width}-{theme}.png"
                self.page.screenshot(path=path, full_page=True, animations="disabled")
        self.page.emulate_media(color_scheme="light")
        if before is not None:
            self.page.set_viewport_size(before)


@dataclass
class Browser:
    """One process for a file of tests."""

    chromium: Chromium

    @contextmanager
    def open(self, base: str, *, scripts: bool = True) -> Iterator[Visit]:
        """A window of its own, with its own cookies."""
        context: BrowserContext = self.chromium.new_context(
            viewport={"width": 1440, "height": 900},
            color_scheme="light",
            java_script_enabled=scripts,
            reduced_motion="reduce",
        )
        context.set_default_timeout(20_000)
        page = context.new_page()
        visit = Visit(page, base)
        page.add_init_script(_WATCH)
        page.on("pageerror", lambda error: visit.troubles.append(f"error: {error}"))
        page.on(
            "console",
            lambda line: (
                visit.troubles.append(f"console: {line.text}")
                if line.type in ("error", "warning")
                else None
            ),
        )

        def note(url: str) -> None:
            host = urlsplit(url).hostname
            if urlsplit(url).scheme in ("http", "https", "ws", "wss") and host != "127.0.0.1":
                visit.troubles.append(f"request elsewhere: {url}")

        context.on("request", lambda request: note(request.url))
        try:
            yield visit
        finally:
            context.close()


@contextmanager
def running_browser(executable: str) -> Iterator[Browser]:
    """Chromium, until the block ends."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
