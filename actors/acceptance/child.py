"""The process of one check: `python -m tinkermq.actors.acceptance.child CHECK SETTING FILE`.

CHECK and SETTING are JSON; the outcome is written into FILE, as the standard output belongs to
whatever the check runs.
"""

import faulthandler
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

from .figures import Setting
from .outcome import CheckOutcome, error_outcome, found_outcome
from .plan import Check


def main(argv: list[str]) -> int:
    """Run one check and write what came of it; the exit code is 0 also where it failed."""
    faulthandler.enable()
    check = Check(**json.loads(argv[0]))
    given = json.loads(argv[1])
    setting = Setting(on_gpu=given["on_gpu"], folder=Path(given["folder"]))
    Path(argv[2]).write_text(_outcome(check, setting).model_dump_json())
    return 0


def _outcome(check: Check, setting: Setting) -> CheckOutcome:
    module, _, function = check.place.partition(":")
    try:
        found = getattr(import_module(module), function)(setting)
    except Exception as error:  # noqa: BLE001  the boundary of a check
        traceback.print_exc()
        return error_outcome(check.name, error, check.remedy)
    return found_outcome(check.name, found, check.remedy)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
