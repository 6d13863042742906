"""Send one notification, in a process that the scheduler starts for each.

The scheduler can kill the process if the server of a user's URL answers slowly or endlessly. The
URL is a secret and is read from standard input; nothing is printed. In a pool with users the
process connects to public addresses only, and to what the operator names.
"""

import json
import resource
import sys
from typing import Any

from ..envs.user_http import guard_process, reachable

TOLD, REFUSED, NO_APPRISE = 0, 1, 4
"""Exit codes: the notification was sent, it was refused, the package is missing."""
_MEMORY_BYTES = 1 << 30
"""Memory limit of the process, including an answer."""


def main() -> None:
    """Send the notification on standard input: `[url, title, text]` as JSON."""
    url, title, text = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if (allowed := reachable()) is not None:
        guard_process(allowed)
    sys.exit(send_by_apprise(url, title, text))


def send_by_apprise(url: str, title: str, text: str) -> int:
    """Send one notification; return an exit code."""
    try:
        from apprise import Apprise
    except ImportError:
        return NO_APPRISE
    service: Any = Apprise()
    is_told = bool(service.add(url)) and bool(service.notify(title=title, body=text))
    return TOLD if is_told else REFUSED


if __name__ == "__main__":
    main()
