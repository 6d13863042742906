"""Check a game's conversations with a model's tokenizer and chat template.

What `tinkermq env check` and `tinkermq train --dry-run` run. Loads tokenizer and chat template
exactly as a generator does, and no weights. A process of its
own, so that the command line needs neither transformers nor the time to import it: one packed map
comes in on the standard input, one line of JSON goes out.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..schemas.config.job import JobConfig
from ..schemas.config.sections import RolloutConfig
from ..schemas.wire.codec import unpack
from ..schemas.wire.errors import ConfigError, TinkermqError
from .policy.chat import ChatTokenizer, open_chat


@dataclass(frozen=True)
class Exchange:
    """A first prompt, and what policy and game said to each other."""

    messages: list[dict[str, Any]]
    """Chat messages of the first prompt."""
    actions: list[str]
    """The policy's answers."""
    observations: list[list[dict[str, Any]]]
    """The game's answers to them, each as chat messages; the last one is not shown any more."""


def check_chat(
    chat: ChatTokenizer,
    rollout: RolloutConfig,
    conversations: Sequence[Exchange],
    *,
    gold: bool,
) -> list[dict[str, Any]]:
    """Answer the questions, as the fields of `envs.check.CheckResult`.

    `gold` says that the conversations are those of right answers: they must fit the limits too.
    """
    questions: list[tuple[str, Callable[[], str]]] = [
        ("the chat template only appends", lambda: _appends(chat, rollout)),
        ("first prompts fit", lambda: _prompts_fit(chat, rollout, conversations)),
    ]
    if gold:
        questions.append(
            ("gold answers fit the limits", lambda: _answers_fit(chat, rollout, conversations))
        )
    return [_ask(name, question) for name, question in questions]


def _ask(name: str, question: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"name": name, "ok": True, "detail": question(), "hint": ""}
    except TinkermqError as error:
        return {"name": name, "ok": False, "detail": error.message, "hint": error.hint}


def _appends(chat: ChatTokenizer, rollout: RolloutConfig) -> str:
    multi_turn = rollout.max_turns > 1
    chat.check_template(multi_turn=multi_turn)
    return "earlier turns stay as they are" if multi_turn else "one turn: nothing comes after it"


def _prompts_fit(
    chat: ChatTokenizer, rollout: RolloutConfig, conversations: Sequence[Exchange]
) -> str:
    lengths = [len(chat.first_prompt(one.messages)) for one in conversations]
    _at_most("a first prompt", "tokens", max(lengths), "rollout.max_prompt_tokens", rollout)
    return f"{min(lengths)} to {max(lengths)} of {rollout.max_prompt_tokens} tokens"


def _answers_fit(
    chat: ChatTokenizer, rollout: RolloutConfig, conversations: Sequence[Exchange]
) -> str:
    num_turns = max(len(one.actions) for one in conversations)
    _at_most("a gold play", "turns", num_turns, "rollout.max_turns", rollout)
    longest, longest_turn = 0, 0
    for one in conversations:
        turns, observed = _lengths(chat, one)
        longest = max(longest, sum(turns) + observed)
        longest_turn = max(longest_turn, *turns)
    _at_most("a gold answer", "tokens", longest_turn, "rollout.max_turn_tokens", rollout)
    _at_most("a gold play", "tokens", longest, "rollout.max_response_tokens", rollout)
    return f"up to {num_turns} turns and {longest} of {rollout.max_response_tokens} tokens"


def _lengths(chat: ChatTokenizer, one: Exchange) -> tuple[list[int], int]:
    """Return the tokens of each answer, end of turn included, and those of the observations."""
    stop = chat.stop_token_ids[0]
    answers = [[*chat.encode_reply(action), stop] for action in one.actions]
    shown = zip(answers, one.observations[: len(answers) - 1], strict=False)
    observed = [len(chat.next_turn(ids, messages)) for ids, messages in shown]
    return [len(ids) for ids in answers], sum(observed)


def _at_most(what: str, unit: str, found: int, key: str, rollout: RolloutConfig) -> None:
    limit: int = getattr(rollout, key.removeprefix("rollout."))
    if found > limit:
        raise ConfigError(
            f"{what} has {found} {unit}, {key} is {limit}", hint=f"raise {key} to {found}"
        )


def main() -> int:
    """Answer on the standard output what stands on the standard input."""
    asked = unpack(sys.stdin.buffer.read())
    config = JobConfig.model_validate(asked["config"])
    conversations = [Exchange(**one) for one in asked["conversations"]]
    try:
        checks: list[dict[str, Any]] = []
        if conversations:
            chat = open_chat(config.model)
            checks += check_chat(chat, config.rollout, conversations, gold=asked["gold"])
        if asked["job"]:
            from .check_job import check_job  # needs torch, which a tokenizer does not

            checks += check_job(config)
        answer: Any = {"checks": checks}
    except TinkermqError as error:
        answer = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
