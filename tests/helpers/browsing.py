"""A browser for tests: Chromium through Playwright, in tabs that note every error and every request to another machine.

Needs Chromium (Debian's package `chromium`) and Playwright's Python package; without them the tests fail and say so.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SECONDS = 20.0  # for anything to become visible

OpenTab = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = CHROMIUM if CHROMIUM.exists() else shutil.which("chromium")
    if path is None:
        pytest.fail("these tests drive Chromium, and there is none: install the package `chromium`")
    expect.set_options(timeout=1000 * SECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """One browser tab that notes what must not be: errors on its console, and requests to other machines."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.complaints: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._check_request)
        self.page.goto(url)

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.complaints.append(f"a request to {request.url}")


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page; at the end no tab may have complained."""
    tabs: list[Tab] = []

    def open_one(url: str, **options: Any) -> Page:
        tabs.append(Tab(browser, url, **options))
        return tabs[-1].page

    yield open_one
    complaints = [complaint for tab in tabs for complaint in tab.complaints]
    for tab in tabs:
        tab.context.close()
    assert not complaints, complaints


def wait_until(condition: Callable[[], Any], what: str, page: Page, seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} seconds: {what}"
        page.wait_for_timeout(50)  # unlike time.sleep, lets the browser's events in
    return result


def picture(canvas: Locator) -> str:
    return canvas.evaluate("canvas => canvas.toDataURL()")


def wait_for_colours(page: Page) -> None:
    """Until nothing fades or changes its colour any more: axe measures colours as they are."""
    ends = "a => a.playState !== 'running' || a.effect.getComputedTiming().iterations === Infinity"
    page.wait_for_function(f"() => document.getAnimations().every({ends})")


def fits(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")
