"""Requests of programs: whatever comes with the key of an episode, under any path.

They are answered by the endpoints of the proxy that programs find next to their host; the rest of
the gateway never sees them, and they never reach anything of it.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from ....broker.client.keys import EPISODE_KEY
from ....envs.agents.proxy.exchange import ClientGone, HttpExchange
from ....envs.agents.proxy.model_calls import MAX_BODY_BYTES
from ....envs.agents.proxy.open_episodes import bare_key
from ....envs.agents.proxy.routes import api_of, presented_keys, split_path
from ....envs.http_server import give_connection_to
from ....schemas.wire.errors import TinkermqError
from .episodes import ProgramEpisodes


class ProgramRequests:
    """ASGI middleware that takes the requests of programs out."""

    def __init__(self, app: ASGIApp, *, episodes: ProgramEpisodes) -> None:
        """Pass what comes without an episode's key on to `app`."""
        self._app = app
        self._episodes = episodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a program, or let somebody else be answered."""
        if not is_of_program(scope):
            await self._app(scope, receive, send)
            return
        exchange = HttpExchange(scope, receive, send)
        exchange.api = api_of(split_path(exchange.path)[1])
        try:
            episode = await self._episodes.of_key(_key_of(scope))
            give_connection_to(f"{episode.user}'s programs", scope)
            with self._episodes.share(episode.user).taken(_body_bytes(exchange)):
                await episode(scope, receive, send)
        except ClientGone:
            return
        except TinkermqError as error:
            await exchange.fail(error)


def is_of_program(scope: Scope) -> bool:
    """Whether a request comes with the key of an episode, or with one in its path."""
    if scope["type"] != "http":
        return False
    return bool(split_path(scope["path"])[0]) or bool(_presented(scope))


def _key_of(scope: Scope) -> str:
    """Return the key of an episode: that in the path, if there is one."""
    return bare_key(split_path(scope["path"])[0]) or _presented(scope)


def _presented(scope: Scope) -> str:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    keys = (bare_key(key) for key in presented_keys(headers) if key)
    return next((key for key in keys if key.startswith(EPISODE_KEY)), "")


def _body_bytes(exchange: HttpExchange) -> int:
    """Return how large a body is, or may be."""
    told = exchange.headers.get("content-length", "")
    if told.isascii() and told.isdecimal() and len(told) < 12:
        return min(int(told), MAX_BODY_BYTES)
    return MAX_BODY_BYTES if "transfer-encoding" in exchange.headers else 0
