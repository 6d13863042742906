"""Nodes that check one job at a time: users take them in turn."""

import asyncio
from collections import Counter

from tinkermq.actors.scheduler.submission.dry_run import NodeTurns

from tests.support.waiting import until


async def test_who_asks_again_and_again_waits_behind_the_others() -> None:
    turns, done = NodeTurns(), Counter[str]()

    async def checks_forever(user: str) -> None:
        while True:
            async with turns.one_of(["node"]):
                await asyncio.sleep(0)
            done[user] += 1

    tasks = [asyncio.create_task(checks_forever(user)) for user in ("ada", "bob", "eve")]
    await until(lambda: done["eve"] >= 20, "the third user")
    assert max(done.values()) - min(done.values()) <= 1
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_who_no_longer_waits_keeps_no_node_and_others_are_used_meanwhile() -> None:
    turns, order, ends = NodeTurns(), list[str](), asyncio.Event()

    async def check(user: str, *nodes: str) -> None:
        async with turns.one_of(nodes) as node:
            order.append(f"{user} {node}")
            await ends.wait()

    first = [asyncio.create_task(check(user, "a", "b")) for user in ("ada", "bob")]
    await until(lambda: order == ["ada a", "bob b"], "both nodes")
    waiting = [asyncio.create_task(check(user, "a")) for user in ("eve", "dan")]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first[0].cancel()
    await until(lambda: order[2:] == ["dan a"], "the next one")
    ends.set()
    await asyncio.wait([*first, *waiting])
