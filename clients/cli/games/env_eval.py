"""`tinkermq env eval`: how well does a model play a game?"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ....envs.registry import load_game
from ....schemas.job import JobRecord
from ....schemas.wire.errors import ConfigError
from ...home import find_url
from ...inference.inference import InferenceReport, InferenceSampling
from ...inference.openai_endpoint import Endpoint
from ...inference.openai_play import play_with_endpoint
from ...pool import Pool
from ...sync.quiet import quiet_logs
from ...sync.single_error import single_errors
from ..models.infer import (
    Progress,
    conclude,
    play_in_pool,
    read_tasks,
    resolve_served,
)
from ..options import COMMON, Common
from ..output import note
from ..session import with_pool
from .chosen_game import choosing_game

MAX_TURNS = 10
"""Answers of the policy per episode where no YAML file says another number."""
NUM_SEEDS = 100
"""Episodes of a generated game, unless another number is asked for."""


def evaluate(
    game: str,
    /,
    *arguments: str,
    model: str | None = None,
    model_name: str | None = None,
    data: list[Path] | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    tasks: str | None = None,
    max_samples: int | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    max_turns: int | None = None,
    max_tokens_per_turn: int | None = None,
    seed: int = 0,
    concurrent: int = 64,
    common: Common = COMMON,
) -> int:
    """Play a game with a model, many episodes at once, and tell how it did.

    The model is an OpenAI-compatible URL, asked from here without a pool, or what `tinkermq infer`
    takes: a model folder, RUN@STEP, a run, a job that serves.

    Parameters
    ----------
    game
        Registered name, `package.module:Class`, or the YAML file of a run: its validation data,
        turns and limits are used.
    arguments
        `key=value`: of the game's constructor, or of the YAML file.
    model
        `http://HOST:PORT/v1`, a model folder, RUN@STEP, a run, or a job that serves; default:
        that of the YAML file. The key of a URL is $OPENAI_API_KEY.
    model_name
        Name of the model at a URL; default: the only one there.
    data
        Parquet or JSONL files of a dataset game; default: what its `make_data` makes.
    output
        JSONL file of the results; started again with the same settings, it goes on with it.
    tasks
        A fixed list of rows, or seeds of a generated game: `1,5,9`, or a file with one a line.
    max_samples
        Play at most so many tasks; default: all rows, or 100 seeds.
    samples
        Episodes per task; over 1 gives pass@k.
    temperature
        Sampling temperature; 0 is greedy.
    max_turns
        Answers of the policy per episode; default: those of the YAML file, or 10.
    max_tokens_per_turn
        Tokens of one turn.
    seed
        Seed from which those of the rows follow.
    concurrent
        Episodes at the same time.
    """
    with choosing_game(game, arguments, [str(path) for path in data or []]) as chosen:
        asked = model or (chosen.job.model.path if chosen.job else None)
        if asked is None:
            raise ConfigError(
                "it was not said which model is to play", hint="give --model URL, FOLDER or RUN"
            )
        rollout = chosen.job.rollout if chosen.job else None
        rows = chosen.env.val_data or chosen.env.train_data
        play = _at_endpoint if asked.startswith(("http://", "https://")) else _in_pool
        report = play(
            asked,
            model_name,
            common,
            InferenceSampling(
                temperature=temperature,
                max_turns=max_turns or (rollout.max_turns if rollout else MAX_TURNS),
                max_tokens_per_turn=max_tokens_per_turn
                or (rollout.max_turn_tokens if rollout else None),
                max_tokens=rollout.max_response_tokens if rollout else None,
            ),
            game_class=load_game(chosen.env.game),
            game_kwargs=chosen.env.kwargs,
            data_path=rows or None,
            output_path=output,
            tasks=read_tasks(tasks) if tasks else None,
            max_samples=max_samples or (None if rows or tasks else NUM_SEEDS),
            samples_per_task=samples,
            seed=seed,
            success_reward=chosen.job.evaluation.success_reward if chosen.job else 0.5,
            max_concurrent=concurrent,
        )
    return conclude(report, output, as_json=common.json)


def _at_endpoint(
    url: str, model_name: str | None, common: Common, sampling: InferenceSampling, **options: Any
) -> InferenceReport:
    quiet_logs()
    endpoint = Endpoint.find(url, model_name)
    note(f"{endpoint.model} at {endpoint.url} plays")
    progress = Progress(as_json=common.json)
    with single_errors():
        return asyncio.run(
            play_with_endpoint(
                endpoint,
                sampling=sampling,
                on_result=progress.take,
                on_start=progress.start,
                **options,
            )
        )


def _in_pool(
    model: str, model_name: str | None, common: Common, sampling: InferenceSampling, **options: Any
) -> InferenceReport:
    if model_name is not None:
        raise ConfigError("--model-name has no effect here", hint="it is for a URL")
    url = find_url(common.nats_url)

    async def resolve(pool: Pool) -> tuple[JobRecord | None, dict[str, Any]]:
        return await resolve_served(pool, model)

    served, _ = with_pool(url, resolve)
    progress = Progress(as_json=common.json)
    return play_in_pool(url, served, model, progress=progress, **vars(sampling), **options)
