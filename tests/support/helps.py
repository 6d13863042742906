"""What Python programs say when they are asked for `--help`: `… -m tests.support.helps NAME …`.

A name is that of a module, or of a script's file. Prints what each says, by name, as JSON.
"""

import contextlib
import io
import json
import runpy
import sys


def told(name: str) -> str:
    """Return a program's help; raises RuntimeError for one that goes on without it."""
    said = io.StringIO()
    sys.argv = [name, "--help"]
    try:
        with contextlib.redirect_stdout(said):
            if name.endswith(".py"):
                runpy.run_path(name, run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        if not ended.code:
            return said.getvalue()
    raise RuntimeError(f"{name} --help: {said.getvalue()}")


if __name__ == "__main__":
    helps = {name: told(name) for name in sys.argv[1:]}
    print(json.dumps(helps))
