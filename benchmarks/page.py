"""docs/benchmarks.md from the results of the scripts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.report import shown

Result = dict[str, Any]
_HEAD = """\
# Benchmarks

For those who compare: ratios to a peer or limit measured in the same run, with their targets in
parentheses. `make bench` writes this page; each script prints its tables too.
"""

_WITH_TABLES = (
    "against_trl",
    "against_trl_environment",
    "against_trl_language_model",
    "engine_language",
    "gomoku",
    "real_times",
    "scheduler",
    "tinker_peer",
    "vllm",
)
"""Results whose tables the page shows; of the others it has the figures only."""


def page(results: Sequence[Result]) -> str:
    """Return the page."""
    parts = [_HEAD, _machine(results), _summary(results), *(_section(item) for item in results)]
    return "\n".join(part for part in parts if part)


def _machine(results: Sequence[Result]) -> str:
    """Describe the machine of the newest result."""
    if not results:
        return "No results yet.\n"
    found = max(results, key=lambda item: item["date"])["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return (
        f"Machine: {found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB, "
        f"{found['system']}. Installed: {packages}.\n"
    )


def _summary(results: Sequence[Result]) -> str:
    """Count the targets, and link the sections where some were missed."""
    targets = [
        (result, figure) for result in results for figure in result["figures"] if figure["target"]
    ]
    missed = [(result, figure) for result, figure in targets if not figure["met"]]
    if not targets:
        return ""
    count = f"{len(targets) - len(missed)} of {len(targets)} targets were met."
    if not missed:
        return f"{count}\n"
    missed_in = Counter(result["name"].replace("_", "-") for result, _ in missed)
    links = ", ".join(f"[{name}](#{name}): {number}" for name, number in missed_in.items())
    return f"{count} The others are marked in {links}.\n"


def _section(result: Result) -> str:
    when = f"{result['date'].split()[0]}, commit `{result['machine']['commit']}`"
    parts = [
        f"## {result['name'].replace('_', '-')}",
        "",
        f"{result['title']}: `{result['command']}` ({when})",
        "",
    ]
    for table in result["tables"] if result["name"] in _WITH_TABLES else ():
        parts += [f"{table['title']}:", "", _table(table["columns"], table["rows"])]
    for figure in result["figures"]:
        if not figure["target"] and _is_in_a_table(figure, result["tables"]):
            continue
        missed = "" if figure["met"] else ", **missed**"
        target = f" ({figure['target']}{missed})" if figure["target"] else ""
        parts.append(f"- {figure['what']}: {shown(figure['value'], figure['unit'])}{target}")
    parts += [f"- {note}" for note in result["notes"]]
    return "\n".join([*parts, "", *([result["remark"], ""] if result["remark"] else [])])


def _is_in_a_table(figure: dict[str, Any], tables: Sequence[dict[str, Any]]) -> bool:
    """Return whether a table shows the value as one of its cells."""
    value = shown(figure["value"], figure["unit"])
    cells = {str(cell) for table in tables for row in table["rows"] for cell in row}
    return not cells.isdisjoint({value, value.removesuffix("×")})


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in (columns, *rows)]
    head, *body = (f"| {' | '.join(line)} |\n" for line in cells)
    return "".join([head, f"|{'---|' * len(columns)}\n", *body])
