"""Closes the live connections of a user, through the server's system account."""

import asyncio
import json
from typing import Any, cast

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from ...broker.credentials import ACCOUNT

_SCATTER_S = 0.5
_KICK_S = 2.0
_PAGE = 1024
_MAX_ROUNDS = 20
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


async def kick(system: Client, user: str) -> int:
    """Close all connections of a user, at every server of the cluster; return how many.

    A user who was shut out before cannot come back.
    """
    closed = 0
    for _ in range(_MAX_ROUNDS):
        found = await _connections(system, user)
        if not found:
            break
        for server, cid in found:
            payload = json.dumps({"cid": cid}).encode()
            subject = f"$SYS.REQ.SERVER.{server}.KICK"
            await system.request(subject, payload, timeout=_KICK_S)
        closed += len(found)
    _log.info("user_kicked", user=user, connections=closed)
    return closed


async def _connections(system: Client, user: str) -> list[tuple[str, int]]:
    """Return server id and connection id of each connection of a user."""
    query = {"auth": True, "user": user, "acc": ACCOUNT, "limit": _PAGE, "state": 0}
    answers: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = system.new_inbox()
    subscription = await cast("Any", system).subscribe(inbox, cb=answers.put)
    found: list[tuple[str, int]] = []
    try:
        await system.publish("$SYS.REQ.SERVER.PING.CONNZ", json.dumps(query).encode(), reply=inbox)
        async with asyncio.timeout(_SCATTER_S):
            while True:  # one answer from each server
                found += _read(await answers.get(), user)
    except TimeoutError:
        return found
    finally:
        await subscription.unsubscribe()


def _read(answer: Msg, user: str) -> list[tuple[str, int]]:
    told: Any = json.loads(answer.data)
    data: Any = told.get("data") or {}
    connections = cast("list[dict[str, Any]]", data.get("connections") or [])
    server = str(told["server"]["id"])
    return [(server, int(one["cid"])) for one in connections if one["authorized_user"] == user]
