"""Record the moving pictures of README.md, a part of `make screenshots`.

One run of the quickstart's task, in a stack of its own. While it goes on, the live view of
`tinkermq train` is drawn and the run's page in the dashboard is photographed, some times a second;
both are played in some ten seconds afterwards, so faster than they were. They are WebP without
losses, which browsers and GitHub show: text is as sharp as in a GIF of twice or thrice the bytes.
"""

import asyncio
import io
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from PIL import Image
from playwright.async_api import Browser, Page, ViewportSize
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from tinkermq.broker.client.connection import connect
from tinkermq.clients.cli.live import LiveDisplay
from tinkermq.clients.follow import RunProgress, follow_run
from tinkermq.clients.pool import Pool
from tinkermq.envs.games.calculator import make_data

from docs.screenshots import IMAGES, ROOT, own_stack, submit
from tests.support.browser import open_browser

MAX_FILE_BYTES = 400_000
NUM_FRAMES = 56
FRAME_MS, LAST_MS = 180, 2500
PLAYED_MS = (NUM_FRAMES - 1) * FRAME_MS + LAST_MS
NUM_SHADES = 24
COLUMNS = 108
PAGE: ViewportSize = {"width": 960, "height": 780}
_SAMPLE_S = 0.25
_SETTLE_S = 2.0
_DEADLINE_S = 600
_COMMAND = "[bold green]$[/] tinkermq train examples/calculator.yaml name=calculator\n"
_DARK, _LIGHT = (22, 24, 31), (208, 212, 222)
_RED, _GREEN, _YELLOW = (235, 110, 115), (110, 200, 130), (229, 192, 107)
_BLUE, _MAGENTA, _CYAN = (105, 160, 245), (200, 130, 225), (85, 190, 205)
_COLOURS = TerminalTheme(
    _DARK, _LIGHT, [_DARK, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _LIGHT]
)
_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: #16181f; }
pre { display: inline-block; margin: 0; padding: 18px 22px; background: #16181f; color: #d0d4de;
  font: 15px/1.35 "DejaVu Sans Mono", monospace; width: %dch; height: %dlh; overflow: hidden; }
</style><pre></pre>"""

Frame = TypeVar("Frame", str, bytes)


@dataclass
class Recording:
    """What was seen of a run: the live view as HTML, and its page as PNG, with their times."""

    texts: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    photos: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])


def drawn(display: LiveDisplay) -> str:
    """Return what a terminal shows of a run, as HTML."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(_COMMAND, display.draw(), sep="")
    return console.export_html(theme=_COLOURS, code_format="{code}", inline_styles=True)


async def watch(pool: Pool, job: str, page: Page, url: str) -> Recording:
    """Follow a run to its end, and look at it meanwhile, from its first step on."""
    record = await pool.find(job)
    progress = RunProgress(record)
    display, seen, begun = LiveDisplay(progress), Recording(), asyncio.Event()

    async def follow() -> None:
        async with aclosing(follow_run(pool, record, with_actors=True)) as updates:
            async for update in updates:
                display.show(update)
                if progress.step:
                    begun.set()

    async def photograph() -> None:
        await page.goto(f"{url}/jobs/{job}")
        await page.locator(".chart canvas").first.wait_for()
        while not following.done():
            await look()
        await asyncio.sleep(_SETTLE_S)  # the page, too, hears of the end
        await look()

    async def look() -> None:
        now = time.monotonic()
        seen.photos.append((now, await page.screenshot()))
        await asyncio.sleep(_SAMPLE_S)

    async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow())
        await begun.wait()
        tasks.create_task(photograph())
        while not following.done():
            seen.texts.append((time.monotonic(), drawn(display)))
            await asyncio.sleep(_SAMPLE_S)
        seen.texts.append((time.monotonic(), drawn(display)))
    return seen


def chosen(frames: Sequence[tuple[float, Frame]]) -> list[Frame]:
    """Return frames at equal distances in time, the first and the last among them."""
    first, last = frames[0][0], frames[-1][0]
    pause = (last - first) / (NUM_FRAMES - 1)
    moments = [first + number * pause for number in range(NUM_FRAMES - 1)]
    shown = [next(one for at, one in reversed(frames) if at <= moment) for moment in moments]
    return [*shown, frames[-1][1]]


async def typeset(browser: Browser, texts: Sequence[str]) -> list[bytes]:
    """Return pictures of what a terminal showed, all of one size."""
    page = await browser.new_page()
    num_lines = max(text.count("\n") for text in texts)
    await page.set_content(_TERMINAL % (COLUMNS, num_lines))
    place = page.locator("pre")
    pictures: list[bytes] = []
    for text in texts:
        await place.evaluate("(place, html) => { place.innerHTML = html; }", text)
        pictures.append(await place.screenshot())
    await page.close()
    return pictures


def in_few_shades(picture: bytes) -> Image.Image:
    """Return a picture in few shades of each colour: two thirds of the bytes, and sharp text."""
    widest = NUM_SHADES - 1
    shades = [round(round(value * widest / 255) * 255 / widest) for value in range(256)]
    return Image.open(io.BytesIO(picture)).convert("RGB").point(shades * 3)


def save(name: str, pictures: Sequence[bytes]) -> None:
    """Write a picture that moves, again and again; refuses one that is too large for a page.

    It begins with the run's end, so that where it does not move it shows a whole run.
    """
    *others, end = map(in_few_shades, pictures)
    file = IMAGES / f"{name}.webp"
    pauses = [LAST_MS] + [FRAME_MS] * len(others)
    end.save(
        file, save_all=True, append_images=others, duration=pauses, loop=0,
        lossless=True, quality=60, method=4, minimize_size=True,
    )  # fmt: skip
    size = file.stat().st_size
    print(f"{file.relative_to(ROOT)}  {end.width} × {end.height}, {size // 1000} kB")
    assert size <= MAX_FILE_BYTES, f"{file.name} has {size:,} bytes"


async def record(url: str, nats: str, home: Path) -> None:
    """Train, look at it, and write both files."""
    train, val = make_data(home / "data")
    places = (f"env.train_data=[{train}]", f"env.val_data=[{val}]")
    async with open_browser() as browser, await connect(nats, name="recordings") as broker:
        keys = ("name=calculator", *places)
        job = await asyncio.to_thread(submit, url, "calculator", home, *keys)
        page = await browser.new_page(viewport=PAGE)
        seen = await watch(Pool(broker), job, page, url)
        took = seen.texts[-1][0] - seen.texts[0][0]
        print(f"{took:.0f} s of a run are played in {PLAYED_MS / 1000:.0f}")
        save("live-terminal", await typeset(browser, chosen(seen.texts)))
        save("live-dashboard", chosen(seen.photos))


def main() -> None:
    """Start a stack, record a run, stop the stack."""
    with own_stack() as (state, home):
        asyncio.run(record(state["gateway"], state["url"], home))


if __name__ == "__main__":
    main()
