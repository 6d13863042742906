"""`tinkermq env play`: the human is the policy."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator

from ....envs.conversations import returns
from ....envs.data import HostData
from ....envs.game import ChatMessage, StepResult
from ....envs.registry import load_game
from ....envs.running.local import LocalEpisode, LocalGame
from ....schemas.wire.errors import ConfigError
from ....schemas.wire.images import plain_text
from ..output import print_json_line, say_plain
from .chosen_game import choosing_game

NOT_ENDED = 1
_CONTINUES = "\\"


def play(
    game: str,
    /,
    *arguments: str,
    seed: int = 0,
    row: int | None = None,
    gold: bool = False,
    train_data: list[str] | None = None,
    json: bool = False,
) -> int:
    """Play an episode yourself: every line is an answer of the policy.

    From a pipe it plays a script: `printf '3\\n5\\n' | tinkermq env play guess`. A line that ends
    with a backslash goes on in the next. Ends with 0 when the game says that it is over, with 1
    when the input ends before.

    Parameters
    ----------
    game
        Registered name, `package.module:Class`, or the YAML file of a run.
    arguments
        `key=value`: of the game's constructor, or of the YAML file.
    seed
        Seed of the episode.
    row
        Row of a dataset game; default: the row that `seed` falls on.
    gold
        Let the game's own `gold_action` play.
    train_data
        Parquet or JSONL files of a dataset game; default: what its `make_data` makes.
    json
        Print the prompt, each turn and the end as a JSON document each.
    """
    show = _Json() if json else _Text()
    with choosing_game(game, arguments, train_data or []) as chosen:
        found = load_game(chosen.env.game)
        if gold and not hasattr(found, "gold_action"):
            raise ConfigError(
                f"{found.__name__} has no gold_action", hint="write one, or play without --gold"
            )
        max_turns = chosen.job.rollout.max_turns if chosen.job else None
        with (
            contextlib.closing(HostData(chosen.env, chosen.seed)) as data,
            contextlib.closing(LocalGame(chosen.env, found, data)) as table,
        ):
            episode = table.start(seed, row=row)
            if not episode.roles:
                show.prompt(episode.messages)
            actions = _gold_actions(episode, echo=not json) if gold else _typed(echo=not json)
            said: Counter[str] = Counter()
            played: list[tuple[str, StepResult]] = []
            while not episode.done:
                role, messages = episode.turn() if episode.roles else ("", [])
                show.role(role, messages)
                action = None if said[role] == max_turns else next(actions, None)
                if action is None:
                    break
                said[role] += 1
                result = episode.step(action)
                show.turn(action, result)
                played.append((role, result))
            show.end(episode, dict.fromkeys(episode.roles or ("",), 0.0) | returns(played))
    return 0 if episode.done else NOT_ENDED


def _gold_actions(episode: LocalEpisode, *, echo: bool) -> Iterator[str]:
    while True:
        action = episode.gold_action()
        if echo:
            say_plain(f"> {action}")
        yield action


def _typed(*, echo: bool) -> Iterator[str]:
    """Yield what is typed, or what stands in the pipe; there it is printed as well."""
    asked = sys.stdin.isatty()
    lines: list[str] = []
    while True:
        try:
            line = input("> " if asked else "")
        except EOFError:
            return
        lines.append(line.removesuffix(_CONTINUES))
        if line.endswith(_CONTINUES):
            continue
        action, lines = "\n".join(lines), []
        if echo and not asked:
            say_plain(f"> {action}")
        yield action


class _Text:
    """Shows an episode to people."""

    def prompt(self, messages: list[ChatMessage]) -> None:
        for message in messages:
            say_plain(f"[{message['role']}]\n{plain_text(message['content'])}")

    def role(self, role: str, messages: list[ChatMessage]) -> None:
        if role:
            say_plain(f"[it is {role}'s turn]")
            self.prompt(messages)

    def turn(self, action: str, result: StepResult) -> None:
        del action  # stands there already
        others = "".join(f", {role} gets {reward:g}" for role, reward in result.rewards.items())
        info = f"  {result.info}" if result.info else ""
        if result.observation:
            say_plain(result.observation)
        say_plain(
            f"[reward {result.reward:g}{others}{', the game is over' if result.done else ''}]{info}"
        )

    def end(self, episode: LocalEpisode, returns: dict[str, float]) -> None:
        turns = len(episode.results)
        told = ", ".join(f"{role} {total:g}".strip() for role, total in returns.items())
        ended = "" if episode.done else ", not over"
        say_plain(f"return {told} after {turns} turn{'s' * (turns != 1)}{ended}")


class _Json:
    """Shows an episode to programs."""

    def prompt(self, messages: list[ChatMessage]) -> None:
        print_json_line({"messages": messages})

    def role(self, role: str, messages: list[ChatMessage]) -> None:
        if role:
            print_json_line({"role": role, "messages": messages})

    def turn(self, action: str, result: StepResult) -> None:
        print_json_line({"action": action, **vars(result)})

    def end(self, episode: LocalEpisode, returns: dict[str, float]) -> None:
        turns = len(episode.results)
        by_role = {"returns": returns} if "" not in returns else {"return": returns[""]}
        print_json_line({**by_role, "turns": turns, "done": episode.done})
