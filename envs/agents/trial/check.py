"""Tries a job's program out: once with the script, and once with a history that is too long."""

from ....broker.client.connection import Broker
from ....schemas.config.job import JobConfig
from .model import ScriptedSpeaker, TrialModel
from .report import MAX_REFUSALS, TrialReport, report_of
from .trial import trial

LIMIT_S = 120.0
"""How long a program may take, unless its job allows less."""


async def check_program(
    broker: Broker,
    job: JobConfig,
    *,
    row: int | None = None,
    seed: int = 0,
    limit_s: float = LIMIT_S,
    tries_context: bool = True,
) -> TrialReport:
    """Run a job's program on one task, here, against a model by a script; return what was found.

    With `tries_context`, and if the program did well, it is run once more, and told at its second
    call, or at its only one, that its history is too long. Raises what `trial` raises.
    """
    async with trial(broker, job, limit_s=limit_s) as here:
        run = await here.run(ScriptedSpeaker(), row=row, seed=seed)
        refused = None
        if tries_context and run.result is not None and report_of(run).ok:
            speaker = ScriptedSpeaker(refuse_from=min(1, len(run.model.calls) - 1))

            def is_enough(_: TrialModel) -> bool:
                return speaker.refusals >= MAX_REFUSALS

            refused = await here.run(speaker, row=row, seed=seed, until=is_enough)
        return report_of(run, refused, train=job.agent.train)
