"""A small plot of a few curves in characters, for terminals and logs."""

from collections.abc import Mapping, Sequence

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
