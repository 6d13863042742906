"""OpenTinker's configuration keys and arguments, translated to ours.

One table maps each such key to our key, to the reason why it makes no difference, or to the reason
why it cannot be translated and the key to use instead. A configuration may mix both kinds; an
unknown key is an error that names the closest one. The meaning of a key is kept: `max_new_tokens`
bounds the whole episode after the first prompt, observations included, which here is
`rollout.max_response_tokens`.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

from ..schemas.config.job import JobConfig
from ..schemas.config.load_config import all_keys
from ..schemas.config.sections import LearnerConfig, RolloutConfig
from ..schemas.wire.errors import ConfigError, did_you_mean

T = TypeVar("T")

_ADVANTAGES = {
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
}
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_BACKENDS = {"file": "jsonl"}
_STEPS = "interaction.config.max_steps"
_TEMPLATE = "interaction.config.observation_template"
_BARE = "{observation}"


class NeedlessWarning(UserWarning):
    """OpenTinker's keys or arguments make no difference to a job here."""


class Translation(NamedTuple):
    """Translation of a known key: our key and the conversion of its value, an error, or nothing."""

    target: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    refusal: str = ""
    """Why it cannot be translated, and the key to use instead."""
    needless: str = ""
    """Why it makes no difference."""


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


_FEWEST_GPUS = 2


def _generators(value: Any) -> int:
    """Return the number of generators besides the learner."""
    if not isinstance(value, int) or isinstance(value, bool) or value < _FEWEST_GPUS:
        raise ConfigError(
            f"num_gpus={value!r} is too few: learner and generator hold one slot each",
            hint=f"give {_FEWEST_GPUS} or more; a slot may be a share of a CPU (`tinkermq node "
            "--slots`)",
        )
    return value - 1


def _run_name(value: Any) -> str:
    letters = (char if char.isalnum() and char.isascii() else "-" for char in str(value).lower())
    return "".join(letters).strip("-")[:64]


def _to(target: str, convert: Callable[[Any], Any] = lambda value: value) -> Translation:
    return Translation(target=target, convert=convert)


def _needless(why: str) -> Translation:
    return Translation(needless=why)


_CONNECTION = "clients take the pool's address, jobs do not"
_HOSTED = "games are reached through the broker, wherever they run"
_TRACED = "each run's episodes are in `tinkermq rollouts` and the dashboard"
_AGENT_LOOP = "every job runs the agent loop"
_WORKERS = "generator.max_episodes and env.workers say how many play at once"

TABLE: dict[str, Translation] = {
    "tokenizer_path": _to("model.path"),
    "model_path": _to("model.path"),
    "adv_estimator": _to("algorithm.advantage", lambda name: _ADVANTAGES.get(str(name), str(name))),
    "rollout_n": _to("rollout.group_size"),
    "max_prompt_tokens": _to("rollout.max_prompt_tokens"),
    "max_new_tokens": _to("rollout.max_response_tokens"),
    "temperature": _to("rollout.temperature"),
    "top_p": _to("rollout.top_p"),
    "top_k": _to("rollout.top_k", lambda k: max(0, int(k))),
    "batch_size": _to("training.batch_size"),
    "val_batch_size": _to("env.num_val"),
    "num_steps": _to("training.num_steps"),
    "num_epochs": _to("training.num_epochs"),
    "save_freq": _to("training.save_freq"),
    "test_freq": _to("training.test_freq"),
    "validate_before_training": _to("training.validate_before_training"),
    "learning_rate": _to("learner.lr"),
    "lr": _to("learner.lr"),
    "num_gpus": _to("generator.count", _generators),
    "data_path": _to("env.train_data", _as_list),
    "data_paths": _to("env.train_data", _as_list),
    "val_data_path": _to("env.val_data", _as_list),
    "val_data_paths": _to("env.val_data", _as_list),
    "project_name": _to("project"),
    "experiment_name": _to("name", _run_name),
    "checkpoint_path": _to("output_dir"),
    "logger_backends": _to(
        "logger_backends", lambda names: [_BACKENDS.get(name, name) for name in _as_list(names)]
    ),
    "multi_turn.max_tokens_per_turn": _to("rollout.max_turn_tokens"),
    "multi_turn.weave_project": _needless(_TRACED),
    "multi_turn.experiment_name": _needless(_TRACED),
    "lora.lora_rank": _to("lora.rank"),
    "lora.lora_alpha": _to("lora.alpha"),
    "lora.target_modules": _to(
        "lora.targets", lambda names: names if names == "all-linear" else _as_list(names)
    ),
    "lora.exclude_modules": _to("lora.exclude", _as_list),
    "lora.lora_adapter_path": _to("model.path"),
    "lora.lr": _to("learner.lr"),
    "algorithm": _needless(_AGENT_LOOP),
    "enable_agent_loop": _needless(_AGENT_LOOP),
    "agent_num_workers": _needless(_WORKERS),
    "num_workers": _needless(_WORKERS),
    "interaction": _needless(_HOSTED),
    "env_host": _needless(_HOSTED),
    "env_port": _needless(_HOSTED),
    "env_endpoint": _needless(_HOSTED),
    "env_shards": _needless(_HOSTED),
    "scheduler_url": _needless(_CONNECTION),
    "scheduler_api_key": _needless(_CONNECTION),
    "api_key": _needless(_CONNECTION),
    "server_url": _needless(_CONNECTION),
    "reward_function": Translation(
        refusal="pass it to the GameEnvironment, or name it: env.reward.source=function and "
        "env.reward.function=package.module:function"
    ),
    "wandb_key": _needless("submit_job hands it over sealed, and no record holds it"),
    "enable_tracing": _needless(_TRACED),
    "weave_project": _needless(_TRACED),
    "bind_worker_to_endpoint": _needless(_HOSTED),
    "env_url": _needless(_HOSTED),
    "tensor_parallel_size": Translation(
        refusal="use generator.count, or generator.tensor_parallel with vllm"
    ),
    "gpu_memory_utilization": _needless("the engine takes what it needs"),
}


def translate(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` as a tree of our own keys.

    Dotted keys become sections. One warning lists the keys that make no difference.
    Raises one ConfigError for all keys that are unknown, have no effect here, or contradict another
    key.
    """
    tree: dict[str, Any] = {}
    flat = dict(flatten(config))
    refused: list[ConfigError] = []
    for take in (
        _translate_lora,
        _translate_turn_limits,
        _translate_template,
        _translate_kl,
        _translate_turn_samples,
    ):
        with _collected(refused):
            take(flat, tree)
    needless: dict[str, str] = {}
    for key, value in flat.items():
        with _collected(refused):
            _translate_key(key, value, tree, needless)
    if "max_new_tokens" in flat and "max_response_tokens" in tree.get("rollout", {}):
        with _collected(refused):
            _fit_lengths(tree)
    if refused:
        raise _all_of(refused)
    training = tree.get("training", {})
    if training.get("num_steps") is not None:  # it wins, as there
        training.pop("num_epochs", None)
    if needless:
        warn_needless(needless)
    return tree


def _translate_key(key: str, value: Any, tree: dict[str, Any], needless: dict[str, str]) -> None:
    """Add one key to the tree, or to the ignored ones."""
    entry = _find(key, value)
    if entry is None:
        _put(tree, key, value, key)
    elif entry.needless:
        needless[key] = entry.needless
    elif entry.refusal:
        raise ConfigError(f"configuration key {key} has no effect here", hint=entry.refusal)
    elif value is not None:
        _put(tree, entry.target, _converted(entry.convert, key, value), key)


@contextlib.contextmanager
def _collected(refused: list[ConfigError]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        refused.append(error)


def _all_of(refused: Sequence[ConfigError]) -> ConfigError:
    if len(refused) == 1:
        return refused[0]
    lines = "".join(f"\n  {error.message}: {error.hint}" for error in refused)
    return ConfigError(
        f"{len(refused)} configuration keys cannot be used as they are{lines}",
        hint="docs/opentinker.md lists what each key becomes",
    )


def warn_needless(needless: Mapping[str, str]) -> None:
    """Warn of ignored keys or arguments, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in needless.items():
        by_reason.setdefault(reason, []).append(key)
    reasons = "; ".join(f"{', '.join(keys)}: {reason}" for reason, keys in by_reason.items())
    warnings.warn(f"left out, as nothing changes by it: {reasons}", NeedlessWarning, stacklevel=1)


def _converted(convert: Callable[[Any], T], key: str, value: Any) -> T:
    """Convert a value; ConfigError names the key of an invalid one."""
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}={value!r} cannot be used: {error}",
            hint="see docs/opentinker.md for what OpenTinker's keys become",
        ) from error


def flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a tree under dotted keys; free maps of our keys are not divided."""
    leaves: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        inner = _section(value)
        if inner and name not in _OURS:
            leaves += flatten(inner, f"{name}.")
        elif value is not None or name in _OURS:
            leaves.append((name, value))
    return leaves


def _section(value: Any) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


_OURS = frozenset(all_keys())
_SECTIONS = frozenset(JobConfig.model_fields) - _OURS


def _find(key: str, value: Any) -> Translation | None:
    """Return the table's entry for a key, or None for one of our own keys."""
    if key in TABLE:
        return TABLE[key]
    if key in _OURS or (key in _SECTIONS and value == {}):
        return None
    if key in _SECTIONS:
        raise ConfigError(
            f"{key} is a section, got {value!r}", hint="see `tinkermq config schema` for its keys"
        )
    section = key.split(".")[0]
    # In OpenTinker `algorithm` is a string, here it is a section.
    if section in TABLE and not TABLE[section].target and section not in _SECTIONS:
        return TABLE[section]
    raise ConfigError(
        f"unknown configuration key {key}",
        hint=did_you_mean(
            key, [*_OURS, *TABLE], otherwise="see `tinkermq config schema` for all keys"
        ),
    )


def _put(tree: dict[str, Any], target: str, value: Any, source: str) -> None:
    *sections, last = target.split(".")
    place = tree
    for section in sections:
        place = place.setdefault(section, {})
    if last in place and place[last] != value:
        raise ConfigError(
            f"{source}={value!r} and another key both set {target}, to different values",
            hint=f"keep one of them; {target} is the key here",
        )
    place[last] = value


def _translate_lora(flat: dict[str, Any], _: dict[str, Any]) -> None:
    """Translate `lora`: a rank of 0 switches the whole section off."""
    if flat.get("lora.lora_rank") == 0:
        for key in [key for key in flat if key.startswith("lora.")]:
            del flat[key]


def _fit_lengths(tree: dict[str, Any]) -> None:
    """Fit the lengths that OpenTinker does not set to `max_new_tokens`.

    Without `max_tokens_per_turn` a turn may use the whole budget; the learner's rows must hold
    the longest episode.
    """
    rollout = tree["rollout"]
    rollout.setdefault("max_turn_tokens", rollout["max_response_tokens"])
    prompt = rollout.get("max_prompt_tokens", RolloutConfig().max_prompt_tokens)
    response = rollout["max_response_tokens"]
    longest = _converted(int, "max_prompt_tokens", prompt) + _converted(
        int, "max_new_tokens", response
    )
    learner = tree.setdefault("learner", {})
    if "max_row_tokens" not in learner and longest > LearnerConfig().max_row_tokens:
        learner["max_row_tokens"] = longest
    if not learner:
        del tree["learner"]


def _translate_turn_limits(flat: dict[str, Any], tree: dict[str, Any]) -> None:
    """Use the smallest limit that is not 0 (no limit) as the bound of the policy's answers."""
    steps = _converted(int, _STEPS, flat.pop(_STEPS, None) or 0)
    names = ("multi_turn.max_user_turns", "multi_turn.max_assistant_turns")
    limits = [_converted(int, name, flat.pop(name) or 0) for name in names if name in flat]
    bounds = [limit for limit in [*limits, steps] if limit > 0]
    if bounds:
        _put(tree, "rollout.max_turns", min(bounds), " / ".join(names))
    elif limits:
        raise ConfigError(
            "multi_turn sets no limit on the turns", hint="set multi_turn.max_assistant_turns"
        )


def _translate_template(flat: dict[str, Any], _: dict[str, Any]) -> None:
    """Reject a text frame for observations, which does not exist here."""
    template = flat.pop(_TEMPLATE, _BARE)
    if template != _BARE:
        raise ConfigError(
            f"{_TEMPLATE}={template!r} has no effect here",
            hint="let the game's step return the whole observation",
        )


def _translate_kl(flat: dict[str, Any], tree: dict[str, Any]) -> None:
    """The four `kl.*` keys: coefficient, estimator, and where the penalty enters."""
    keys = ("kl.use_kl_in_reward", "kl.use_kl_loss", "kl.kl_loss_coef", "kl.kl_loss_type")
    in_reward, in_loss, coef, kind = (flat.pop(key, None) for key in keys)
    if in_reward and in_loss:
        raise ConfigError(
            "kl.use_kl_in_reward and kl.use_kl_loss are both on", hint="choose one of them"
        )
    if not (in_reward or in_loss):
        return
    weight = 0.001 if coef is None else _converted(float, "kl.kl_loss_coef", coef)
    _put(tree, "algorithm.kl_coef", weight, "kl.kl_loss_coef")
    _put(tree, "algorithm.kl_in", "reward" if in_reward else "loss", "kl.use_kl_in_reward")
    if kind is not None:
        if not isinstance(kind, str) or kind not in _KL_ESTIMATORS:
            raise ConfigError(
                f"kl.kl_loss_type={kind!r} has no counterpart here",
                hint=did_you_mean(str(kind), _KL_ESTIMATORS),
            )
        _put(tree, "algorithm.kl_estimator", _KL_ESTIMATORS[kind], "kl.kl_loss_type")


def _translate_turn_samples(flat: dict[str, Any], tree: dict[str, Any]) -> None:
    """The two `multi_turn.per_turn_*` keys: turns as samples, and the discount of their returns.

    A discount other than 0 selects returns. `grpo_per_step` has a discount without the other.
    """
    by_turn = flat.pop("multi_turn.per_turn_training", None)
    name = "multi_turn.per_turn_reward_gamma"
    gamma = flat.pop(name, None)
    if by_turn:
        _put(tree, "algorithm.sample", "turn", "multi_turn.per_turn_training")
        _put(tree, "algorithm.turn_reward", "return" if gamma else "reward", name)
    if gamma is not None and (gamma or not by_turn):
        _put(tree, "algorithm.gamma", gamma, name)


# Configurations of users: maps, namespaces, dataclasses, OmegaConf's trees.


def as_tree(value: Any) -> dict[str, Any]:
    """Return any object with named values as plain nested maps.

    Raises ConfigError for an object without named values.
    """
    if value is None:
        return {}
    tree = _plain(value)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"a configuration has named values, this is a {type(value).__name__}",
            hint="give a dict, an argparse.Namespace, a dataclass or an OmegaConf tree",
        )
    return cast("dict[str, Any]", tree)


def refuse_unknown_options(
    function: Callable[..., Any], options: Mapping[str, Any], *also: Callable[..., Any]
) -> None:
    """Raise ConfigError for an option that a function does not have, with the closest it has.

    `also` are the functions that get the other options.
    """
    parameters = [inspect.signature(each).parameters.values() for each in (function, *also)]
    known = [
        parameter.name
        for parameter in chain(*parameters)
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    for name, value in options.items():
        if name in known:
            continue
        refusal = TABLE[name].refusal if name in TABLE else ""
        raise ConfigError(
            f"{function.__name__.removesuffix('_async')} has no option {name} (given {value!r})",
            hint=refusal or did_you_mean(name, known, otherwise=f"it has {', '.join(known)}"),
        )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        fields = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(inner) for key, inner in fields.items()}
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in cast("Sequence[Any]", value)]
    if hasattr(value, "__fspath__"):
        return str(value)
    if hasattr(value, "__dict__") and not callable(value):
        attributes = cast("dict[str, Any]", vars(value))
        return {key: _plain(inner) for key, inner in attributes.items() if not key.startswith("_")}
    return value


# The arguments of OpenTinker's `run_inference`, translated to ours.

_SERVED = "the served model determines it"
_NEEDLESS = {
    "env_endpoint": "the game is hosted in this process, or by the pool",
    "tokenizer_path": _SERVED,
    "max_context_length": _SERVED,
    "tensor_parallel_size": _SERVED,
    "gpu_memory_utilization": _SERVED,
    "trust_remote_code": _SERVED,
}
_TURNS = ("max_user_turns", "max_assistant_turns")


def translate_inference(
    options: Mapping[str, Any], game_class: type | None, ours: Collection[str]
) -> dict[str, Any]:
    """Return options of `ours`: one limit of turns, the game's arguments in `game_kwargs`.

    Unneeded options are ignored with one warning. An argument is the game's if its constructor has
    it and ours does not. Raises ConfigError for contradicting limits.
    """
    rest = dict(options)
    needless = {name: _NEEDLESS[name] for name in _NEEDLESS if rest.pop(name, None) is not None}
    if needless:
        warn_needless(needless)
    limits = [limit for name in _TURNS if (limit := rest.pop(name, None))]
    if limits and rest.get("max_turns") is not None:
        raise ConfigError(
            f"max_turns={rest['max_turns']} and {' / '.join(_TURNS)} both bound the turns",
            hint="keep max_turns",
        )
    if limits:
        rest["max_turns"] = min(limits)
    own = {
        name: rest.pop(name)
        for name in _of_constructor(game_class)
        if name in rest and name not in ours
    }
    if own:
        rest["game_kwargs"] = {**(rest.get("game_kwargs") or {}), **own}
    return rest


def _of_constructor(game_class: type | None) -> list[str]:
    """Return the argument names of a game's constructor."""
    if game_class is None:
        return []
    return [
        name
        for name, parameter in inspect.signature(game_class).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
