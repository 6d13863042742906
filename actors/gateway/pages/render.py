"""Templates, in which all values are escaped and a missing name is an error."""

import hashlib
import time
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from ..web import gateway_of

HERE = Path(__file__).parent
STATIC = HERE / "static"
THEMES = ("auto", "light", "dark")

__all__ = ["STATIC", "THEMES", "compile_templates", "make_templates", "render"]


def make_templates() -> Environment:
    """Return the templates with the filters they use."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = cast("dict[str, Any]", environment.filters)
    for function in (duration, number, size, clock, level):
        filters[function.__name__] = function
    cast("dict[str, Any]", environment.globals)["stamp"] = _stamp()
    return environment


def compile_templates(templates: Environment) -> None:
    """Compile every template, so that the first visitor of a page does not wait for it."""
    for name in templates.list_templates():
        templates.get_template(name)


def render(request: Request, name: str, shown: dict[str, Any], status: int = 200) -> HTMLResponse:
    """Return a page; `shown` must have the logged-in `user`."""
    gateway = gateway_of(request)
    theme = request.cookies.get("theme", "auto")
    text = gateway.templates.get_template(name).render(
        {
            "user": "",
            "with_keys": gateway.sessions.with_keys,
            "theme": theme if theme in THEMES else "auto",
            "path": request.url.path,
            **shown,
        }
    )
    return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


def _stamp() -> str:
    """Return a short digest of the static files, so that browsers fetch those of a new release."""
    digest = hashlib.sha256()
    for file in sorted(STATIC.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def duration(seconds: float | None) -> str:
    """Return a span of time in its two largest units: `3 h 20 min`."""
    if seconds is None:
        return ""
    whole = int(seconds)
    for unit, length, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= length:
            rest = whole % length // part
            return (
                f"{whole // length} {unit} {rest} {smaller}"
                if rest
                else f"{whole // length} {unit}"
            )
    return f"{whole} s"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number in few digits; empty for None."""
    if value is None or value != value:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}"


def size(count: float) -> str:
    """Return a number of bytes: `3.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def clock(seconds: float, shape: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time stamp in UTC."""
    return time.strftime(shape, time.gmtime(seconds))


def level(value: float, low: float, high: float) -> int:
    """Return the fifth, 0 to 4, of the range from `low` to `high` that holds a value; 2 if none."""
    fifth = (value - low) / (high - low) * 5 if high > low else 2.0
    return int(min(4.0, max(0.0, fifth))) if fifth == fifth else 2
