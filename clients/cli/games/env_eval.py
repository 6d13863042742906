"""`tinkermq env eval`: how well does a model play a game?"""

import asyncio

from ....envs.registry import load_game
from ....schemas.wire.errors import ConfigError
from ...home import find_url
from ...inference.openai_endpoint import Endpoint
from ...inference.openai_play import play_with_endpoint
from ...inference.play import InferenceReport, PlayOptions
from ...sync.quiet import quiet_logs
from ...sync.single_error import single_errors
from ..options import COMMON, Common
from ..output import note
from ..playing import PLAY_FLAGS, PlayFlags, Progress, conclude, find_served, play_in_pool
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
    flags: PlayFlags = PLAY_FLAGS,
    concurrent: int = 64,
    common: Common = COMMON,
) -> int:
    """Play a game with a model, many episodes at once, and tell how it did.

    The model is an OpenAI-compatible URL, asked from here without a pool, or what `tinkermq infer`
    takes: a model folder, RUN@STEP, a run, a job that serves.

    Parameters
    ----------
    game
        Registered name, `package.module:Class`, or the YAML file of a run, whose validation data,
        turns and limits are used; else what `make_data` makes, or 100 seeds, and 10 turns.
    arguments
        `key=value`: of the game's constructor, or of the YAML file.
    model
        `http://HOST:PORT/v1`, a model folder, RUN@STEP, a run, or a job that serves; default:
        that of the YAML file. The key of a URL is $OPENAI_API_KEY.
    model_name
        Name of the model at a URL; default: the only one there.
    concurrent
        Episodes at the same time.
    """
    with choosing_game(game, arguments, [str(path) for path in flags.data or []]) as chosen:
        asked = model or (chosen.job.model.path if chosen.job else None)
        if asked is None:
            raise ConfigError(
                "it was not said which model is to play", hint="give --model URL, FOLDER or RUN"
            )
        rollout = chosen.job.rollout if chosen.job else None
        rows = chosen.env.val_data or chosen.env.train_data
        options = flags.options(
            game_class=load_game(chosen.env.game),
            game_kwargs=chosen.env.kwargs,
            data_path=rows or None,
            max_samples=flags.max_samples or (None if rows or flags.tasks else NUM_SEEDS),
            max_turns=flags.max_turns or (rollout.max_turns if rollout else MAX_TURNS),
            max_tokens_per_turn=flags.max_tokens_per_turn
            or (rollout.max_turn_tokens if rollout else None),
            max_tokens=rollout.max_response_tokens if rollout else None,
            success_reward=chosen.job.evaluation.success_reward if chosen.job else 0.5,
            max_concurrent=concurrent,
        )
        play = _at_endpoint if asked.startswith(("http://", "https://")) else _in_pool
        report = play(asked, model_name, common, options)
    return conclude(report, flags.output, as_json=common.json)


def _at_endpoint(
    url: str, model_name: str | None, common: Common, options: PlayOptions
) -> InferenceReport:
    quiet_logs()
    endpoint = Endpoint.find(url, model_name)
    note(f"{endpoint.model} at {endpoint.url} plays")
    progress = Progress(as_json=common.json)
    with single_errors():
        return asyncio.run(play_with_endpoint(endpoint, progress.follow(options)))


def _in_pool(
    model: str, model_name: str | None, common: Common, options: PlayOptions
) -> InferenceReport:
    if model_name is not None:
        raise ConfigError("--model-name has no effect here", hint="it is for a URL")
    url = find_url(common.nats_url)
    served, _ = find_served(url, model)
    return play_in_pool(url, served, model, options, as_json=common.json)
