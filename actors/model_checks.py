"""Check a job's model with the code that the run uses: kind, template, lengths, data, saving.

Nothing is trained and no weights are read: the model is built on torch's meta device, which has
shapes but no memory. `model check`, `env check --model`, `train --dry-run` and nodes start this as
a process of their own (see `schemas/checks.py`): it reads one packed map from standard input.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..envs.check import Exchange
from ..schemas.checks import Check, run_checks, write_results
from ..schemas.config.job import JobConfig, ModelConfig
from ..schemas.config.sections import RolloutConfig
from ..schemas.wire.codec import unpack
from ..schemas.wire.errors import ConfigError, ModelError
from .model_kind import kind_checks
from .policy import model_folder
from .policy.chat import ChatTokenizer, make_chat, open_chat
from .rollout.template_facts import first_prompt, next_turn
from .storage.adapters import base_of, is_adapter, root_of

ROWS_S = 60.0
"""Seconds for checking the rows of a job's conversations; later rows are not checked."""


def model_checks(
    config: JobConfig, exchanges: Sequence[Exchange] = (), *, gold: bool = False, whole: bool = True
) -> Iterator[Check]:
    """Yield the checks of a job's model, and of episodes of its game.

    `exchanges` are episodes of its game, with right answers if `gold`. Without `whole` only the
    tokenizer and these episodes are checked.
    """
    chat: list[ChatTokenizer] = []
    if whole:
        yield from kind_checks(config)

    def open_tokenizer() -> str:
        chat.append(open_chat(config.model))
        if whole and not config.sft.data:
            make_chat(config)
        return "opened as by the run"

    yield Check("the model's tokenizer and template can be used", open_tokenizer)
    if chat and exchanges:
        yield from chat_checks(chat[0], config.rollout, exchanges, gold=gold)
    if not whole:
        return
    if config.sft.data:
        yield Check("each row can be learnt from", lambda: _check_rows(config))
    yield Check("the weights are those of the configuration", lambda: _check_weights(config.model))
    if config.lora.rank or is_adapter(config.model.path):
        yield Check("the adapter fits the model", lambda: _check_adapter(config))
    yield Check("its layers can do what the learner asks", lambda: _check_layers(config))
    yield Check("a checkpoint can be written", lambda: _check_saving(config.model))


# -- a game's conversations with the model's chat template -----------------------------------------


def chat_checks(
    chat: ChatTokenizer, rollout: RolloutConfig, exchanges: Sequence[Exchange], *, gold: bool
) -> Iterator[Check]:
    """Yield the checks of episodes with a chat template; with `gold`, their answers must fit."""
    yield Check("the chat template only appends", lambda: _check_template(chat, rollout))
    yield Check("first prompts fit", lambda: _check_prompts(chat, rollout, exchanges))
    if gold:
        yield Check("gold answers fit the limits", lambda: _check_answers(chat, rollout, exchanges))


def _check_template(chat: ChatTokenizer, rollout: RolloutConfig) -> str:
    multi_turn = rollout.max_turns > 1
    chat.check_template(multi_turn=multi_turn)
    if not multi_turn:
        return "one turn: nothing comes after it"
    if chat.keeps_reasoning:
        return "earlier turns stay as generated, with reasoning that the template leaves out"
    return "earlier turns stay as they are"


def _check_prompts(
    chat: ChatTokenizer, rollout: RolloutConfig, exchanges: Sequence[Exchange]
) -> str:
    """Count the first prompts as a generator makes them, with the schemas of the tools."""
    lengths = [len(first_prompt(chat, exchange.messages, exchange.tools)) for exchange in exchanges]
    _refuse_above_limit("a first prompt", "tokens", max(lengths), "max_prompt_tokens", rollout)
    return f"{min(lengths)} to {max(lengths)} of {rollout.max_prompt_tokens} tokens"


def _check_answers(
    chat: ChatTokenizer, rollout: RolloutConfig, exchanges: Sequence[Exchange]
) -> str:
    num_turns = max(len(exchange.actions) for exchange in exchanges)
    _refuse_above_limit("a gold play", "turns", num_turns, "max_turns", rollout)
    longest, longest_turn = 0, 0
    stop = chat.stop_token_ids[0]
    for exchange in exchanges:
        answers = [[*chat.encode_reply(action), stop] for action in exchange.actions]
        shown = exchange.observations[: len(answers) - 1]
        observed = sum(
            len(next_turn(chat, text, ids, messages, exchange.tools))
            for text, ids, messages in zip(exchange.actions, answers, shown, strict=False)
        )
        longest = max(longest, sum(map(len, answers)) + observed)
        longest_turn = max(longest_turn, *map(len, answers))
    _refuse_above_limit("a gold answer", "tokens", longest_turn, "max_turn_tokens", rollout)
    _refuse_above_limit("a gold play", "tokens", longest, "max_response_tokens", rollout)
    return f"up to {num_turns} turns and {longest} of {rollout.max_response_tokens} tokens"


def _refuse_above_limit(
    what: str, unit: str, number: int, key: str, rollout: RolloutConfig
) -> None:
    limit: int = getattr(rollout, key)
    if number > limit:
        raise ConfigError(
            f"{what} has {number} {unit}, rollout.{key} is {limit}",
            hint=f"raise rollout.{key} to {number}",
        )


# -- the model's files and the job's data ----------------------------------------------------------


def _check_rows(config: JobConfig) -> str:
    """Tokenise conversations as the job's generators do."""
    from ..envs.data import ChatData
    from .rollout.demonstrations import tokenise_row

    chat, deadline = open_chat(config.model), time.monotonic() + ROWS_S
    with contextlib.closing(ChatData(config.sft.data)) as data:
        longest, number = 0, 0
        while number < len(data) and (number == 0 or time.monotonic() < deadline):
            tokens = tokenise_row(data.row(number), chat, config)
            longest = max(longest, len(tokens.token_ids))
            number += 1
        some = "" if number == len(data) else f" the first {number:,} of"
        lengths = f"sft.data:{some} {len(data):,} rows, up to {longest} tokens"
        return "; ".join(filter(None, (lengths, data.note)))


def _check_weights(model: ModelConfig) -> str:
    """Compare the shapes of the stored tensors with those of the configured model."""
    import torch

    path = root_of(model.path)
    model_folder.check_model_folder(path)
    if not Path(path).is_dir():
        return f"{path} is the hub's: not checked"
    with torch.device("meta"):
        built: Any = model_folder.load_causal_lm(
            path, dtype=torch.float32, trust_remote_code=model.trust_remote_code, hollow=True
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    stored = model_folder.stored_shapes(Path(path))
    for name, shape in stored.items():
        if name in shapes and shapes[name] != shape:
            raise ModelError(
                f"{name} of model {path} has the shape {list(shape)}, config.json makes it "
                f"{list(shapes[name])}",
                hint="config.json and the weights are of two models, or the embedding was resized "
                "and one of them not saved: save both with `model.save_pretrained`",
            )
    return f"{len(stored)} tensors" if stored else "no *.safetensors: not checked"


def _check_adapter(config: JobConfig) -> str:
    """Put the adapter on the model as the learner does, without its weights."""
    import torch

    model = config.model
    with torch.device("meta"):
        built: Any = model_folder.load_policy(
            model.path,
            config.lora,
            seed=config.seed,
            dtype=torch.float32,
            trust_remote_code=model.trust_remote_code,
            hollow=True,
        )
    if not config.lora.rank:
        return f"that of {model.path} is merged into {base_of(model.path)}"
    trained = sum(int(tensor.numel()) for tensor in built.parameters() if tensor.requires_grad)
    return f"{trained:,} numbers are trained"


def _check_layers(config: JobConfig) -> str:
    """Prepare the model as the learner does, without its weights."""
    from .training.model import try_layers

    try_layers(config)
    return "recomputation, attention, divided rows and replayed routers, as configured"


def _check_saving(model: ModelConfig) -> str:
    """Write a checkpoint without weights as a learner does, and read it again."""
    model_folder.check_saving(
        root_of(model.path),
        model.tokenizer or model.path,
        trust_remote_code=model.trust_remote_code,
    )
    return "all but the weights was written and read again"


def main() -> None:
    """Print the results for the request on standard input."""
    request = unpack(sys.stdin.buffer.read())
    config = JobConfig.model_validate(request["config"])
    if request.get("alone"):
        write_results(run_checks(kind_checks(config, alone=True)))
        return
    exchanges = [Exchange(**exchange) for exchange in request["exchanges"]]
    checks = model_checks(config, exchanges, gold=request["gold"], whole=request["whole"])
    write_results(run_checks(checks))


if __name__ == "__main__":
    main()
