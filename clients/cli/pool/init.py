"""`tinkermq init`: the secrets of a pool with authentication, and its first admin."""

from pathlib import Path

from ....broker.client.login import KEY_VARIABLE
from ....broker.credentials import PoolSecrets
from ....schemas.wire.subjects import user_name
from ...home import Home
from ..output import print_json, say


def init(
    *,
    home: Path | None = None,
    admin: str = "admin",
    days: float = 365.0,
    json: bool = False,
) -> int:
    """Make the secrets of a pool with authentication and its first admin; shows the key once.

    From then on `tinkermq up` with this folder starts a broker that lets nobody in without a key.

    Parameters
    ----------
    home
        Folder of the stack; default: $TINKERMQ_HOME, or ~/.local/share/tinkermq.
    admin
        Name of the first admin.
    days
        Life of the admin's key; 0: for ever.
    json
        Print JSON.
    """
    folder = Home(home.resolve() if home else None).secrets
    key = PoolSecrets(folder).create(user_name(admin), days)
    if json:
        print_json({"user": admin, "api_key": key, "secrets": str(folder)})
        return 0
    say(f"secrets are in {folder}, for you alone to read")
    say(f"  the key of [bold]{admin}[/], shown this once:")
    say(f"  export {KEY_VARIABLE}={key}")
    say(f"  a nats-server of your own includes {PoolSecrets(folder).accounts}")
    say("  [bold]tinkermq up[/]                start the pool, with authentication")
    say("  [bold]tinkermq user add NAME[/]     make a user")
    return 0
