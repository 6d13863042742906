"""`tinkermq data prepare`."""

from pathlib import Path

from ....envs.math.prepare import prepare as prepare_set
from ..output import literal, print_json, say


def prepare(
    name: str, source: Path, out: Path, /, *, instruction: str | None = None, json: bool = False
) -> int:
    """Make parquet files for training from the original files of a published set.

    Parameters
    ----------
    name
        The set: gsm8k, math or geo3k.
    source
        Folder of its original files.
    out
        Folder to write train.parquet, test.parquet … to.
    instruction
        What to put behind each question; default: the set's usual words.
    json
        Print JSON.
    """
    written = prepare_set(name, source, out, instruction)
    if json:
        print_json([{"path": str(one.path), "rows": one.rows} for one in written])
        return 0
    for one in written:
        say(f"{literal(str(one.path))}  {one.rows} rows")
    return 0
