"""Debian's chromium, driven by playwright: no window, no network beyond this machine."""

import contextlib
import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.support.waiting import PATIENCE_S

__all__ = ["FLAGS", "Browser", "chromium", "open_browser", "watched_page"]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 1000 * PATIENCE_S
expect.set_options(timeout=PATIENCE_MS)  # a page's own timeout is for its actions only


def chromium() -> str:
    """Return the path of chromium; fails with the remedy when it is not installed."""
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("chromium is not installed: apt-get install --no-install-recommends chromium")
    return found


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Run a browser until the block ends."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def watched_page(browser: Browser, base_url: str) -> AsyncIterator[Page]:
    """Open a page of its own session; errors of its scripts, or of its policy, fail the test.

    A form that is refused (400) is none.
    """
    context = await browser.new_context(base_url=base_url)
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if is_error(said) else None)
    page.on("dialog", lambda dialog: dialog.accept())

    def is_error(said: ConsoleMessage) -> bool:
        return said.type == "error" and "status of 400" not in said.text

    try:
        yield page
    finally:
        await context.close()
    assert not errors, errors
