"""Take the pictures of docs/dashboard.md: `make screenshots`.

Starts a stack of its own, trains the bandit and the guessing game for about two minutes, and opens
the dashboard in Debian's chromium. It prints each picture that it writes to docs/images/.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from PIL import Image
from playwright.async_api import Browser, Page
from tinkermq.actors.warm_start import warm_start

from tests.support.browser import open_browser

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MODELS = Path("outputs") / "models"  # below ROOT, where the stack runs
WIDE, PHONE = 1280, 390
_POLL_S = 1.0
_DEADLINE_S = 600
_SERVED_MS = 120_000


class Shot(NamedTuple):
    """One picture."""

    name: str
    path: str
    scheme: Any = "light"
    width: int = WIDE
    height: int = 860


def tinkermq(home: Path, *words: str) -> str:
    """Run one command on the stack of a folder; return what it printed."""
    code = "import sys; from tinkermq.clients.cli import main; sys.exit(main())"
    environment = {**os.environ, "TINKERMQ_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout


def ask(url: str, body: Any = None) -> Any:
    """Ask the gateway for JSON."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"content-type": "application/json"}), timeout=30) as reply:
        return json.load(reply)


def submit(url: str, game: str, home: Path, *overrides: str) -> str:
    """Submit an example; return its job id."""
    warm_start(game, ROOT / MODELS / game)
    places = [f"output_dir={home / 'runs'}", f"model.path={MODELS / game}"]
    config = (ROOT / "examples" / f"{game}.yaml").read_text(encoding="utf-8")
    body = {"config": config, "overrides": [*places, *overrides]}
    return str(ask(f"{url}/api/v1/jobs", body)["job"])


async def until_step(url: str, job: str, step: int) -> None:
    """Wait until a job has done so many steps."""
    for _ in range(int(_DEADLINE_S / _POLL_S)):
        if (await asyncio.to_thread(ask, f"{url}/api/v1/jobs/{job}"))["step"] >= step:
            return
        await asyncio.sleep(_POLL_S)
    raise TimeoutError(f"job {job} did not come to step {step}")


async def take(browser: Browser, url: str, shot: Shot) -> None:
    """Take one picture."""
    context = await browser.new_context(
        viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.scheme
    )
    page = await context.new_page()
    await page.goto(url + shot.path)
    await page.wait_for_timeout(2500)
    await shoot(page, shot.name)
    await context.close()


async def shoot(page: Page, name: str) -> None:
    """Write the picture of what a page shows."""
    file = IMAGES / f"{name}.png"
    await page.screenshot(path=file)
    with Image.open(file) as shown:  # 256 colours are enough, and a third of the bytes
        small = shown.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(file, optimize=True)
    print(file.relative_to(ROOT))


async def take_all(url: str, home: Path) -> None:
    """Train, and take the pictures meanwhile."""
    bandit = submit(url, "bandit", home, "training.save_freq=20", "training.num_steps=150",
                    "training.test_freq=10", "algorithm.kl_coef=0.001")  # fmt: skip
    guess = submit(url, "guess", home, "training.num_steps=80", "training.save_freq=20")
    waits = submit(url, "guess", home, "name=waits-for-room", "generator.count=3")
    await until_step(url, guess, 12)
    await until_step(url, bandit, 40)
    groups = ask(f"{url}/api/v1/jobs/{guess}/rollouts")["groups"]
    seq = max(groups, key=lambda group: len({one["reward"] for one in group["episodes"]}))["seq"]
    group = ask(f"{url}/api/v1/jobs/{guess}/rollouts/{seq}/0")
    longest = max(
        group["siblings"],
        key=lambda one: ask(f"{url}/api/v1/jobs/{guess}/rollouts/{seq}/{one['episode']}")[
            "num_tokens"
        ],
    )
    episode = f"/jobs/{guess}/rollouts/{seq}/{longest['episode']}"
    async with open_browser() as browser:
        for shot in (
            Shot("dashboard-jobs", "/jobs", height=420),
            Shot("dashboard-job", f"/jobs/{bandit}"),
            Shot("dashboard-job-dark", f"/jobs/{bandit}", "dark"),
            Shot("dashboard-rollouts", f"/jobs/{guess}/rollouts"),
            Shot("dashboard-episode", episode, height=640),
            Shot("dashboard-pool", "/pool", "dark", height=620),
            Shot("dashboard-phone", f"/jobs/{bandit}", "dark", PHONE, 844),
        ):
            await take(browser, url, shot)
        await until_step(url, guess, 22)
        for job in (waits, bandit):  # makes room for the server of the playground
            ask(f"{url}/api/v1/jobs/{job}/stop", {"now": True})
        await take_playground(browser, url, guess)


async def take_playground(browser: Browser, url: str, job: str) -> None:
    """Talk with the oldest checkpoint of a run, and take the pictures of both pages."""
    page = await browser.new_page(viewport={"width": WIDE, "height": 640})
    await page.goto(f"{url}/jobs/{job}/checkpoints")
    await page.locator("tbody tr").last.locator("button:text('Chat')").click()
    await page.locator("button.primary:text('Send'):not([disabled])").wait_for(timeout=_SERVED_MS)
    for text in ("Guess my number, from 1 to 9.", "higher"):
        await page.fill("textarea[name=text]", text)
        await page.press("textarea[name=text]", "Control+Enter")
        await page.locator("[data-again]").wait_for()
    await shoot(page, "dashboard-playground")
    await page.goto(f"{url}/jobs/{job}/checkpoints")
    await page.wait_for_timeout(1000)
    await shoot(page, "dashboard-checkpoints")


@contextlib.contextmanager
def own_stack() -> Iterator[tuple[dict[str, Any], Path]]:
    """Run a stack until the block ends; yield what `up` tells of it, and its folder."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        state = json.loads(tinkermq(home, "up", "--port", "0", "--slots", "4", "--json"))
        try:
            yield state, home
        finally:
            tinkermq(home, "down")


def main() -> None:
    """Start a stack, take the pictures, stop it."""
    with own_stack() as (state, home):
        asyncio.run(take_all(state["gateway"], home))


if __name__ == "__main__":
    main()
