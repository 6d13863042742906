"""The part of `env check` that needs a tokenizer: done by a process of the pool's room."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ....envs.check import CheckResult, PlayedEpisode, conversations, has_gold
from ....envs.registry import load_game
from ....schemas.config.job import JobConfig
from ....schemas.wire.codec import pack
from ....schemas.wire.errors import ConfigError, ModelError, error_from_reply
from ..games.chosen_game import ChosenGame

_DEADLINE_S = 120.0


def model_to_check(chosen: ChosenGame, model: str | None) -> tuple[str | None, str]:
    """Return the model whose tokenizer can be asked, or None and why there is none.

    Raises ConfigError for a model that was asked for and cannot be had here.
    """
    path = model or (chosen.job.model.path if chosen.job else None)
    if path is None:
        return None, ""
    here = importlib.util.find_spec("transformers") is not None
    if not here and model is not None:
        raise ConfigError(
            "--model needs transformers, which is not installed here",
            hint="pip install 'tinkermq[worker]', or leave --model out",
        )
    if not here:
        return None, "transformers is not installed here"
    if model is None and not Path(path).expanduser().is_dir():
        return None, f"{path} is not a folder here (--model names one)"
    return path, ""


def check_with_model(chosen: ChosenGame, model: str) -> list[CheckResult]:
    """Ask a model's tokenizer and chat template about the game's conversations.

    Of a job what else it reads of its model is looked at, too. Raises ModelError for a model that
    cannot be opened, GameError.
    """
    job = chosen.job or JobConfig.model_validate({"model": {"path": model}, "env": chosen.env})
    config = job.model_dump(mode="json", exclude_unset=True)
    config["model"]["path"] = model
    return _ask(config, _played(job, chosen.seed), job, is_whole=chosen.job is not None)


def can_look(config: JobConfig) -> bool:
    """Whether this machine can look into a job's model: it is here, and so is transformers."""
    is_here = Path(config.model.path).expanduser().is_dir()
    return is_here and importlib.util.find_spec("transformers") is not None


def check_job_here(config: JobConfig, *, plays: bool) -> list[CheckResult]:
    """Look at what a job reads of its model and data, with the code of the run.

    `plays` says that its game is sound here: its conversations are looked at, too. Raises
    ModelError for a model that cannot be opened.
    """
    played = _played(config, config.seed) if plays else []
    return _ask(config.model_dump(mode="json", exclude_unset=True), played, config, is_whole=True)


def _played(job: JobConfig, seed: int) -> list[dict[str, Any]]:
    return [_told(one) for one in conversations(job.env, seed=seed)]


def _ask(
    config: dict[str, Any], played: list[dict[str, Any]], job: JobConfig, *, is_whole: bool
) -> list[CheckResult]:
    model = str(Path(config["model"]["path"]).expanduser())
    config["model"]["path"] = model
    asked = {
        "config": config,
        "conversations": played,
        "gold": bool(played) and has_gold(load_game(job.env.game)),
        "job": is_whole,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tinkermq.actors.check_chat"],
            input=pack(asked),
            capture_output=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"model {model} was not looked at within {_DEADLINE_S:g} s",
            hint="see whether its folder lies on a disk that answers",
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ModelError(f"the tokenizer of {model} cannot be asked: {' '.join(last)}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        error = answer["error"]
        raise error_from_reply(error["code"], error["message"], error["hint"])
    return [CheckResult(**result) for result in answer["checks"]]


def _told(transcript: PlayedEpisode) -> dict[str, Any]:
    return {
        "messages": transcript.messages,
        "actions": transcript.actions,
        "observations": [
            {"role": result.role, "content": result.observation} for result in transcript.results
        ],
    }
