"""What users have used is told to the scheduler; who has used up a quota waits, and goes on."""

from pathlib import Path

import pytest
import torch
from tinkermq.actors.scheduler.jobs.states import with_usage
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.tinker.usage import TenantShare, TenantShares, TrainerUsage
from tinkermq.schemas.wire.errors import ExhaustedError
from tinkermq.schemas.wire.subjects import rpc

from tests.support.models import make_tiny_model
from tests.support.tinker_service import SCOPE, Trainer, create, loss, step_body

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("shares") / "base")


class Scheduler:
    """Knows quotas of tokens, as the scheduler does."""

    def __init__(self) -> None:
        self.quota = 50
        self.told: dict[str, int] = {}

    async def answer(self, usage: TrainerUsage) -> TenantShares:
        assert usage.job == SCOPE.job
        self.told |= usage.tokens
        users = {
            user: TenantShare(weight=2.0, tokens_left=max(self.quota - used, 0))
            for user, used in usage.tokens.items()
        }
        return TenantShares(users=users)


async def test_a_used_up_quota_holds_up_losses_until_it_is_raised(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> None:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    trainer, scheduler = Trainer(own_server.url, own_broker, base, tmp_path / "s"), Scheduler()
    subject = rpc(SCOPE.user, "scheduler", "tinker-usage")
    async with await Service.start(own_broker, name="scheduler", description="") as service:
        await service.endpoint("tinker-usage", subject, TrainerUsage, scheduler.answer)
        async with trainer.running() as running:
            await trainer.send("create_model", 0, create())
            await trainer.result(0)
            await running.shares.ask()
            assert running.models.turns.weights == {"ada": 2.0}
            await trainer.train(1, 2)  # 36 tokens each
            await trainer.result(4)
            await running.shares.ask()
            assert scheduler.told == {"ada": 72}
            with pytest.raises(ExhaustedError, match="used all tokens of the quota"):
                await trainer.send("forward_backward", 5, loss(5))
            await trainer.send("optim_step", 6, step_body(6))  # what costs no tokens is taken
            scheduler.quota = 1000
            await running.shares.ask()
            await trainer.train(5, 1)
            assert (await trainer.result(6)).state == "done"
        async with trainer.running() as running:  # counted once, also behind a state
            await trainer.result(6)
            assert running.models.tokens() == {"ada": 108}


def test_what_a_sampler_tells_counts_once_whatever_starts_again() -> None:
    record = JobRecord(
        job="t", name="t", user="pool", kind="tinker", state="RUNNING", config={}, created=1.0
    )

    def told(tokens: int, since: float, sampler: str = "sampler-0") -> None:
        nonlocal record
        usage = TrainerUsage(job="t", tokens={"ada": tokens}, sampler=sampler, since=since)
        record = with_usage(record, usage)
        assert with_usage(record, usage) is record  # asked twice, as after a lost reply

    told(10, 1.0)
    told(25, 1.0)
    told(5, 2.0)  # it was killed and started again
    told(7, 1.5, "sampler-1")
    told(90, 1.0)  # the one that was replaced still tells
    assert record.tinker_sampled == {"ada": 25 + 5 + 7}
    record = with_usage(record, TrainerUsage(job="t", tokens={"ada": 100}))
    record = with_usage(record, TrainerUsage(job="t", tokens={"ada": 60}))
    assert record.tinker_tokens == {"ada": 100}
