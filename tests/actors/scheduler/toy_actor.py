"""An actor that does what a file in its folder says: `toy_actor.py FOLDER NAME`.

`<name>.do` holds `done`, `fail`, `crash`, `hang`, or `show` (the hash of its secret). It imports
nothing of ours, so that it starts at once; its control requests are answered by the test.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

FAILED = {"event": "actor_failed", "code": "model", "message": "no model", "hint": "make one"}


def drain(*_: object) -> None:
    print("drained")
    sys.exit(0)


def obey(do: str) -> None:
    if do == "done":
        sys.exit(0)
    if do == "fail":
        print(json.dumps(FAILED))
        sys.exit(2)
    if do == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "show":
        key = os.environ.get("WANDB_API_KEY", "")
        shown = Path(sys.argv[1]) / f"{sys.argv[2]}.shown"
        shown.write_text(hashlib.sha256(key.encode()).hexdigest() if key else "nothing")
    if do == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, drain)
    order = Path(sys.argv[1]) / f"{sys.argv[2]}.do"
    print("up", flush=True)
    while True:
        if order.exists():
            do = order.read_text()
            order.unlink()
            obey(do)
        time.sleep(0.02)
