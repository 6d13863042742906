"""The error of an episode whose host is not there any more, or has no room for it."""

from ...schemas.wire.errors import GameError


class HostGone(GameError):
    """The host that held the episode no longer answers: the episode starts again elsewhere."""

    code = "host_gone"
