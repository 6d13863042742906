"""Small plots of a few curves: SVG for notebooks, characters for terminals and logs."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 420, 140, 34
_COLOURS = ("#3b6ea5", "#d1782f", "#4a8f4a")


def curve_svg(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return an SVG of curves with a legend; a curve without points is left out.

    The y axis begins at 0 unless a value is below it.
    """
    shown = {name: points for name, points in curves.items() if points}
    if not shown:
        return "<i>no numbers yet</i>"
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    left, right, low, high = min(xs), max(xs), min(0.0, *ys), max(ys)

    def place(x: float, y: float) -> str:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return f"{_MARGIN + across * _WIDTH:.1f},{10 + (1 - up) * _HEIGHT:.1f}"

    lines: list[str] = []
    for number, (name, points) in enumerate(shown.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<text x="{_MARGIN + 150 * number}" y="{_HEIGHT + 40}" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    axis = (
        f'<path d="M{_MARGIN},10 V{_HEIGHT + 10} H{_MARGIN + _WIDTH}" fill="none" stroke="#888"/>'
        f'<text x="0" y="16">{high:.3g}</text><text x="0" y="{_HEIGHT + 10}">{low:.3g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT + 24}">{left:g}</text>'
        f'<text x="{_MARGIN + _WIDTH - 20}" y="{_HEIGHT + 24}">{right:g}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _MARGIN}" '
        f'height="{_HEIGHT + 50}" font-family="sans-serif" font-size="11">'
        f"{axis}{''.join(lines)}</svg>"
    )


# A small plot of a few curves in characters, for terminals and logs.

Points = Sequence[tuple[float, float]]

HEIGHT = 12
WIDTH = 64


def text_plot(curves: Mapping[str, Points], *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Return a plot of curves; the key of each is the one character that marks it.

    Later curves are drawn over earlier ones. The y axis starts at 0 unless a value is below it.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "(nothing to plot)"
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    cells = [[" "] * width for _ in range(height)]
    for mark, curve in curves.items():
        for x, y in curve:
            column = _place(x, left, right, width)
            cells[height - 1 - _place(y, low, high, height)][column] = mark
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    rows = [f"{labels.get(row, ''):>6} │{''.join(line)}" for row, line in enumerate(cells)]
    axis = f"{'':>6} └{'─' * width}"
    numbers = f"{left:<{width // 2}.6g}{right:>{width - width // 2}.6g}"
    return "\n".join([*rows, axis, f"{'':>8}{numbers}"])


def _place(value: float, low: float, high: float, count: int) -> int:
    """Return the cell of a value among `count` cells from low to high."""
    span = (high - low) or 1.0
    return min(count - 1, max(0, round((value - low) / span * (count - 1))))
