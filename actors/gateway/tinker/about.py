"""The endpoints of the Tinker API by which a client learns what the service is."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .reading import visitor_of_key
from .trainers import Trainers

Handler = Callable[[Request], Awaitable[Response]]
_CHUNK_BYTES = 2_000_000
_CONFIG_S = 300
SAMPLES_AT_ONCE = 192
"""Samples that one sampling client has under way, each on a connection that waits for it.

Below what one user may have running (`MAX_RUNNING`), so that training and heartbeats go on.
"""


class AboutApi:
    """The endpoints."""

    def __init__(self, trainers: Trainers) -> None:
        """Tell of `trainers`."""
        self._trainers = trainers

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and endpoint of each."""
        return [
            ("POST", "client/config", self.config),
            ("POST", "client/dynamic_config", self.dynamic_config),
            ("POST", "telemetry", self.telemetry),
            ("GET", "healthz", self.health),
            ("GET", "get_server_capabilities", self.capabilities),
        ]

    async def config(self, request: Request) -> Response:
        """Tell a client how large and how many its requests may be, and that they be compressed."""
        del request
        return JSONResponse(
            {
                "proto_compress_fwdbwd": True,
                "fwdbwd_max_chunk_bytes_count": _CHUNK_BYTES,
                "sample_max_concurrent_requests": SAMPLES_AT_ONCE,
            }
        )

    async def dynamic_config(self, request: Request) -> Response:
        """Tell a client what may change while it runs."""
        del request
        return JSONResponse({"refresh_interval_sec": _CONFIG_S, "sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        """Take what a client tells of itself, and forget it."""
        del request
        return JSONResponse({"status": "accepted"})

    async def health(self, request: Request) -> Response:
        """Say that somebody answers."""
        del request
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: Request) -> Response:
        """List the base models."""
        visitor = await visitor_of_key(request)
        offers = await self._trainers.offers(visitor.broker)
        return JSONResponse(
            {
                "supported_models": [
                    {
                        "model_name": offer.base,
                        "max_context_length": offer.max_context or None,
                        "trainable": True,
                        "sampleable": True,
                    }
                    for offer in offers
                ]
            }
        )
