"""A model that answers programs over HTTP, as the proxy of a host does, and knows nothing else.

It answers every call with one word; `POST /slow` never; what is posted to `/reward` and `/end` goes
into the episode that the key is of.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tinkermq.envs.agents.episode import ProgramEpisode


class ModelEndpoint:
    """Answers calls on a port of its own, and on the sockets of programs."""

    def __init__(self) -> None:
        self.episodes: dict[str, ProgramEpisode] = {}
        self.closed: list[str] = []
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def base_url(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def open(self, episode: ProgramEpisode) -> None:
        """Answer an episode's calls."""
        self.episodes[episode.key] = episode

    def close(self, episode: str) -> None:
        """Answer them no more."""
        self.closed.append(episode)
        self.episodes = {key: one for key, one in self.episodes.items() if one.episode != episode}

    def env_of(self, episode: ProgramEpisode, base_url: str) -> dict[str, str]:
        """Return what tells a program of it."""
        return {"OPENAI_BASE_URL": f"{base_url}/v1", "OPENAI_API_KEY": episode.key}

    @contextlib.asynccontextmanager
    async def listen(self, listening: socket.socket) -> AsyncIterator[None]:
        """Answer at another socket."""
        listening.setblocking(False)
        server = await asyncio.start_server(self._serve, sock=listening, start_serving=False)
        async with server:
            await server.start_serving()
            yield

    async def __aenter__(self) -> "ModelEndpoint":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._answer_one(reader, writer)
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path, lines = head.split()[1], head.lower().split("\r\n")
            length = next((int(one[15:]) for one in lines if one.startswith("content-length:")), 0)
            body = json.loads(await reader.readexactly(length) or "{}")
            key = head.partition("Bearer ")[2].split("\r\n")[0]
            gone = reader.read if path.endswith("/slow") else None
            status, answer = await self._answer(self.episodes.get(key), path, body, gone)
            text = json.dumps(answer)
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nConnection: close\r\n"
                f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
            )
            await writer.drain()

    async def _answer(
        self,
        episode: ProgramEpisode | None,
        path: str,
        body: dict[str, object],
        gone: Callable[[], Awaitable[bytes]] | None,
    ) -> tuple[int, object]:
        if episode is None or episode.over:
            return 401, {"error": "this key is that of no episode"}
        if path.endswith("/reward"):
            episode.reward = body["reward"]  # type: ignore[assignment]
        elif path.endswith("/end"):
            episode.status = body.get("status", "done")  # type: ignore[assignment]
            episode.said_end.set()
        else:
            await self._call(episode, gone)
        return 200, {"choices": [{"message": {"role": "assistant", "content": "four"}}]}

    async def _call(
        self, episode: ProgramEpisode, gone: Callable[[], Awaitable[bytes]] | None
    ) -> None:
        episode.num_open += 1
        episode.last_call = time.monotonic()
        try:
            if gone is not None:
                await gone()
            episode.num_calls += 1
        finally:
            episode.num_open -= 1
            episode.last_call = time.monotonic()
