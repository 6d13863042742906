"""What an inference job serves, from what a user names: a model folder, a run, `run@step`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ...schemas.config.sections import ADAPTER_CONFIG, RolloutConfig
from ...schemas.job import FINAL_STATES, LAST_STEP
from ...schemas.tinker.names import is_path
from ...schemas.wire.codec import merged
from ...schemas.wire.errors import ConfigError, ModelError, NotFoundError
from ..pool import Pool, is_token
from ..validation.names import did_you_mean, run_and_step
from ..validation.paths import is_local_pool, resolve_paths

DEFAULT_CONTEXT = 4096


class ModelSource(NamedTuple):
    """What a submission of kind `infer` says."""

    config: dict[str, Any]
    fork_of: str | None = None
    follow: str | None = None


async def find_source(pool: Pool, name: str) -> ModelSource:
    """Return the submission that serves `name`.

    A run that is live is followed; of one that has ended the last checkpoint is served. A run comes
    before a folder of that name, which is meant by `./name`. Raises
    NotFoundError or ModelError that says what `name` could have meant.
    """
    if is_path(name):
        return await _tinker_source(pool, name)
    folder, run = _folder(name), name.partition("@")[0]
    if is_token(run) and (folder is None or await pool.knows(run)):
        return await _run_source(pool, name)
    if folder is not None:
        return ModelSource(model_config(name, folder))
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_hub_name and is_local_pool(pool.broker.url):
        raise ModelError(
            f"there is no model folder {name!r}",
            hint="give a Hugging Face folder, a model of the hub (owner/name), a run, or RUN@STEP",
        )
    return ModelSource(model_config(name, None))  # the pool's own folder, or the hub's


def _folder(name: str) -> Path | None:
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else None


async def _tinker_source(pool: Pool, path: str) -> ModelSource:
    """Return the submission that serves an adapter of a program written for Tinker."""
    contexts = [offer.max_context for offer in await pool.trainers() if offer.max_context]
    longest = min([DEFAULT_CONTEXT, *contexts])
    return ModelSource(model_config(path, None, longest), fork_of=path)


async def _run_source(pool: Pool, name: str) -> ModelSource:
    run, step = run_and_step(name)
    try:
        record = await pool.find(run)
    except NotFoundError as error:
        runs = [one.name for one in await pool.list_jobs(all=True)]
        raise NotFoundError(
            f"there is no model folder and no run {run!r}",
            hint=did_you_mean(run, runs, otherwise="list runs with `tinkermq ps --all`"),
        ) from error
    if record.kind == "infer" or not record.configured:
        raise ConfigError(
            f"{record.name} is a job of kind {record.kind} that trains nothing",
            hint="name a training run, or the model folder",
        )
    config = record.settings
    if config.get("generator", {}).get("count") == 0:  # its rollouts came from external agents
        config = merged(config, {"generator": {"count": 1}})
    if step is None and record.state not in FINAL_STATES:
        return ModelSource(config, follow=record.job)
    return ModelSource(config, fork_of=f"{record.job}@{step or LAST_STEP}")


def model_config(
    name: str, folder: Path | None, longest: int | None = DEFAULT_CONTEXT
) -> dict[str, Any]:
    """Return the configuration of a plain model, without a game.

    Its context is that of the model, up to `longest`; None: whatever that is.
    """
    positions = _positions(folder)
    context = positions if longest is None else min(longest, positions)
    return {
        "model": {"path": str(folder.resolve()) if folder else name},
        "env": {"game": "", "hosts": 0, "num_val": 0},
        **_lengths(context),
    }


def _lengths(context: int) -> dict[str, Any]:
    """Divide a context between prompt and response, with the usual lengths where they fit."""
    usual = RolloutConfig()
    response = min(usual.max_response_tokens, max(1, context // 2))
    return {
        "rollout": {
            "max_prompt_tokens": min(usual.max_prompt_tokens, context - response),
            "max_response_tokens": response,
            "max_turn_tokens": min(usual.max_turn_tokens, response),
        },
        "generator": {"max_context": context},
    }


def _positions(folder: Path | None) -> int:
    """Return how many positions a model has, or the base of an adapter."""
    try:
        if folder is not None and (folder / ADAPTER_CONFIG).is_file():
            adapter = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            return _positions(_folder(str(adapter["base_model_name_or_path"])))
        text = (folder / "config.json").read_text(encoding="utf-8") if folder else "{}"
        return int(json.loads(text).get("max_position_embeddings", DEFAULT_CONTEXT))
    except (OSError, ValueError, TypeError, KeyError):
        return DEFAULT_CONTEXT  # the server says what is wrong with the folder


def with_options(
    source: ModelSource,
    *,
    tokenizer_path: str | None = None,
    num_servers: int | None = None,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    overrides: dict[str, Any] | None = None,
    broker_url: str = "",
    has_users: bool = False,
) -> dict[str, Any]:
    """Return the configuration of a source with a user's wishes laid over it."""
    config = source.config
    model: dict[str, Any] = {}
    if tokenizer_path is not None and tokenizer_path != config.get("model", {}).get("path"):
        model["tokenizer"] = tokenizer_path
    if trust_remote_code:
        model["trust_remote_code"] = True
    if model:
        config = merged(config, {"model": model})
    if num_servers is not None:
        config = merged(config, {"generator": {"count": num_servers}})
    if max_model_len is not None:
        plain = not config.get("env", {}).get("game")
        lengths = _lengths(max_model_len) if plain else {}
        config = merged(config, merged(lengths, {"generator": {"max_context": max_model_len}}))
    if overrides:
        config = merged(config, overrides)
    return resolve_paths(config, broker_url, has_users=has_users)
