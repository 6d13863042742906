"""Send one notification, in a process that the scheduler starts for each.

The process can be killed: the server behind a user's URL may answer slowly, or without an end. The
URL is a secret and is read from the standard input; nothing is printed.
"""

import json
import resource
import sys
from typing import Any

TOLD, REFUSED, NO_APPRISE = 0, 1, 4
"""Exit codes: the service took it, it did not, the package is missing."""
_MEMORY_BYTES = 1 << 30
"""Of the process, with what an answer holds."""


def main() -> None:
    """Send what the standard input holds, `[url, title, text]` as JSON."""
    url, title, text = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
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
