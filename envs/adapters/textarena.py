"""TextArena's games: alone, or against an opponent of yours.

The policy sees TextArena's new text since its last turn, without its own moves. Rewards are
TextArena's, at the end of the game.
"""

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from ...schemas.wire.errors import GameError
from ..game import AbstractGame, StepResult
from ..reasoning import behind_reasoning
from ..registry import extra, import_object, refuse_unknown
from ..running.global_random import GlobalRandom

Opponent = Callable[[str, random.Random], str]
"""Answers an observation with a move; draws from the passed generator."""

_WON = 1.0


class TextArenaGame(AbstractGame):
    """Play a game of TextArena, alone or against an opponent."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
    needs = extra("textarena", "textarena")
    named_arguments: ClassVar[tuple[str, ...]] = ("opponent",)

    def __init__(
        self,
        env_id: str | Sequence[str],
        kwargs: Mapping[str, Any] | None = None,
        opponent: str = "",
        seat: int | None = None,
    ) -> None:
        """Choose games: each episode draws one of `env_id`; `kwargs` go to its constructor.

        `opponent`, for games of two, is `package.module:function`: it gets its observation and a
        random generator, and returns its move. `seat` is the policy's, 0 moves first; None draws
        it.
        """
        self._package = self.needs.load()
        self._ids = [env_id] if isinstance(env_id, str) else list(env_id)
        known = self._package.envs.registration.ENV_REGISTRY
        refuse_unknown(self._ids, known, "TextArena has no game", "see textarena.ai")
        self._kwargs = dict(kwargs or {})
        self._opponent = _import_opponent(opponent) if opponent else None
        self._num_players = 1 if self._opponent is None else 2
        self._chosen_seat = seat
        self._dice: GlobalRandom
        self._env: Any = None
        self._id = ""
        self._seat = 0

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a game, its seed and the policy's seat."""
        env_id, seed = self.rng.choice(self._ids), self.rng.getrandbits(31)
        seat = self.rng.randrange(self._num_players)
        return {
            "env_id": env_id,
            "seed": seed,
            "seat": seat if self._chosen_seat is None else self._chosen_seat,
        }

    def reset(self, *, env_id: str = "", seed: int = 0, seat: int = 0, **_: Any) -> str:
        """Start the game and show the policy's first observation."""
        self._id, self._seat = env_id, seat
        self._dice = GlobalRandom(seed)
        with self._dice.lent():
            self._env = self._make(env_id)
            self._start(seed)
            if self._play_others():
                raise GameError(f"{env_id} was over before the policy's first move")
            return self._show(self._seat)

    def step(self, action: str) -> StepResult:
        """Play the policy's move and the opponent's answers to it."""
        with self._dice.lent():
            done = bool(self._env.step(behind_reasoning(action))[0]) or self._play_others()
            if not done:
                return StepResult(self._show(self._seat), 0.0, done=False, info={"type": self._id})
            rewards, infos = cast(
                "tuple[dict[int, float] | None, dict[int, Any]]", self._env.close()
            )
        value: Any = (rewards or {}).get(self._seat, 0.0)
        # some games return the reason for refusing a move in place of the reward
        reward = 0.0 if isinstance(value, str) else float(value)
        own = infos[self._seat]
        info = {
            "type": self._id,
            "success": reward >= _WON,
            "seat": self._seat,
            "turns": int(own.get("turn_count", 0)),
            "invalid": bool(own.get("invalid_move", False)),
        }
        return StepResult(str(own.get("reason", "")), reward, done=True, info=info)

    def get_state(self) -> dict[str, Any]:
        """Return the game and the policy's seat."""
        return {"env_id": self._id, "seat": self._seat}

    def _make(self, env_id: str) -> Any:
        """Make a game without the wrappers that repeat its history in every observation."""
        spec = self._package.envs.registration.ENV_REGISTRY[env_id]
        module, _, name = spec.entry_point.partition(":")
        try:
            env = getattr(importlib.import_module(module), name)(**{**spec.kwargs, **self._kwargs})
        except LookupError as error:
            raise GameError(
                f"{env_id} needs word lists of NLTK that are not there: {error.args[0]}",
                hint="python -m nltk.downloader words averaged_perceptron_tagger_eng",
            ) from error
        for wrapper in spec.default_wrappers or ():
            if issubclass(wrapper, self._package.ActionWrapper):
                env = wrapper(env)
        return env

    def _start(self, seed: int) -> None:
        try:
            self._env.reset(num_players=self._num_players, seed=seed)
        except AssertionError as error:
            raise GameError(
                f"{self._id} cannot be played by {self._num_players}: {error}",
                hint="give opponent=package.module:function for a game of two, none for one alone",
            ) from error

    def _play_others(self) -> bool:
        """Let the opponent move until it is the policy's turn; return whether the game is over."""
        state = self._env.state
        while not state.done and state.current_player_id != self._seat:
            assert self._opponent is not None
            seen = self._show(state.current_player_id)
            self._env.step(self._opponent(seen, self.rng))
        return bool(state.done)

    def _show(self, seat: int) -> str:
        """Return the new text for the player whose turn it is, without the player's own moves."""
        state = self._env.state
        news = state.get_current_player_observation()
        kinds = self._package.ObservationType
        boards = [number for number, (_, _, kind) in enumerate(news) if kind == kinds.GAME_BOARD]
        texts = [
            _worded(state, sender, text)
            for number, (sender, text, kind) in enumerate(news)
            if isinstance(kind, kinds)  # some games record moves in this field in their own words
            and not (kind == kinds.PLAYER_ACTION and sender in (seat, self._package.GAME_ID))
            and not (kind == kinds.GAME_BOARD and number != boards[-1])
        ]
        return "\n\n".join(texts)


def _worded(state: Any, sender: int, text: str) -> str:
    name = state.role_mapping.get(sender, "")
    return text.strip() if sender < 0 else f"[{name}] {text.strip()}"


def _import_opponent(target: str) -> Opponent:
    _, opponent = import_object(target)
    if not callable(opponent):
        raise GameError(
            f"opponent {target!r} is not a function", hint="give package.module:function"
        )
    return cast("Opponent", opponent)
