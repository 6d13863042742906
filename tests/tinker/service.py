"""A service of the Tinker API in a test: a stack, a gateway before it, and a base model."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tinkermq.clients.pool import Pool

from tests.support.gateway import Gateway, run_gateway
from tests.support.jobs import Job
from tests.support.models import make_tiny_model
from tests.support.stack import Stack
from tests.support.waiting import eventually
from tests.tinker.sdks import BASE


@dataclass(frozen=True)
class TinkerService:
    """What runs; programs are run in its folder, where the base's name leads to its tokenizer."""

    stack: Stack
    gateway: Gateway
    job: Job
    folder: Path


@asynccontextmanager
async def tinker_service(folder: Path, model: str | None = None) -> AsyncIterator[TinkerService]:
    """Run a service until the block ends: of a tiny model, or of one that its path names."""
    base = model or BASE
    config = {
        "model": {"path": model or str(make_tiny_model(folder / BASE))},
        "env": {"game": "", "hosts": 0, "num_val": 0},
        "tinker": {"base": base},
        "rollout": {"max_prompt_tokens": 4000, "max_response_tokens": 64, "max_turn_tokens": 64},
        "output_dir": str(folder / "runs"),
    }
    async with Stack(folder) as stack, run_gateway(stack.server.url, folder) as gateway:
        record = await Pool(stack.broker).submit(config, kind="tinker")
        job = Job(stack, record)
        await job.until("RUNNING")

        async def offered() -> bool:
            told = await gateway.get(
                "/tinker/api/v1/get_server_capabilities", x_api_key="tml-anybody"
            )
            return base in told.text

        await eventually(offered, "the base model to be offered")
        yield TinkerService(stack, gateway, job, folder)


def adapter_digest(service: TinkerService, told: str) -> str:
    """Return the digest of the adapter that a program has saved at the end."""
    session = told.split("tinker://")[1].split(":")[0]
    found = [
        one
        for one in service.job.run_dir.rglob("adapter_model.safetensors")
        if session in str(one) and "end" in one.parts
    ]
    assert len(found) == 1, found
    return hashlib.sha256(found[0].read_bytes()).hexdigest()
