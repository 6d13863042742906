"""The token-level record of one episode as it grows, turn by turn."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ...envs.game import StepResult
from ...schemas.rollout import Finish, Teaching, Trajectory
from ...schemas.wire.errors import EngineError
from ...schemas.wire.images import images_of
from ..engine.engine import Drawn, ExpertRecord, Generation


@dataclass
class Transcript:
    """What an episode has so far; `begin` gives it its prompt.

    The four lists hold one entry per token of the conversation, but for those of the turn that is
    being generated: if its tokens are reported one by one, they are in `open` until it ends.
    """

    token_ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_prompt: int = 0
    open: list[Drawn] = field(default_factory=list[Drawn])
    data_source: str = ""
    images: tuple[bytes, ...] = ()
    experts: list[ExpertRecord] = field(default_factory=list[ExpertRecord])
    """Of an engine that records them, one part for each turn: all tokens but the last."""
    turn_ends: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    observations: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    """By turn that the game has answered, the messages before the next one."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    first_token: float = 0.0
    """When its first token was generated; 0: not known."""
    generate_s: float = 0.0
    environment_s: float = 0.0

    def begin(
        self, prompt: Sequence[int], messages: list[dict[str, Any]], data_source: str
    ) -> None:
        """Take the first prompt."""
        self.num_prompt = len(prompt)
        self.messages = list(messages)
        self.images = images_of(messages)
        self.data_source = data_source
        self._add_given(prompt)

    def continue_from(self, made: "Transcript") -> None:
        """Become what another generator has made."""
        for part in fields(self):
            setattr(self, part.name, getattr(made, part.name))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those of the open turn included."""
        return len(self.token_ids) + len(self.open)

    @property
    def num_response(self) -> int:
        """Number of tokens behind the prompt, without the open turn."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_generated(self) -> int:
        """Number of tokens that the policy generated so far."""
        return sum(self.mask) + len(self.open)

    @property
    def awaits_answer(self) -> bool:
        """Whether the last turn has ended and the game has not answered it."""
        return len(self.turn_ends) > len(self.rewards)

    @property
    def last_text(self) -> str:
        """The text of the last turn."""
        return self.messages[-1]["content"]

    def end_turn(self, begun: Sequence[Drawn], rest: Generation) -> None:
        """Close a turn of which `begun` was there before and `rest` was generated now."""
        self.open = []
        num = len(begun) + len(rest.token_ids)
        self.token_ids += [*(token.token_id for token in begun), *rest.token_ids.tolist()]
        self.mask += [1] * num
        self.logprobs += [*(token.logprob for token in begun), *rest.logprobs.tolist()]
        self.versions += [*(token.version for token in begun), *rest.versions.tolist()]
        self.turn_ends.append(len(self.token_ids) - 1)
        if rest.experts is not None:
            self._add_experts(rest.experts)

    def note_text(self, text: str) -> None:
        """Note the text of the turn that has just ended."""
        self.messages.append({"role": "assistant", "content": text})

    def turn(self, turn: int) -> tuple[list[int], list[int]]:
        """Return the tokens before a turn that has ended, and its own."""
        end = first = self.turn_ends[turn]
        while self.mask[first - 1]:
            first -= 1
        return self.token_ids[:first], self.token_ids[first : end + 1]

    def add_reply(self, reply: StepResult) -> None:
        """Note the game's answer to the last turn."""
        self.rewards.append(reply.reward)
        self.info = reply.info

    def add_observation(self, ids: Sequence[int], messages: list[dict[str, Any]]) -> None:
        """Append what the game says before the next turn."""
        self._add_given(ids)
        self.observations.append(messages)
        self.messages += messages

    def trajectory(
        self,
        finish: Finish,
        host: str,
        *,
        stop_token_ids: Collection[int],
        seed: int,
        role: str = "",
        greedy: bool = False,
        teaching: Teaching | None = None,
    ) -> Trajectory:
        """Return the record of the episode, which has ended.

        A turn that does not end with one of the stop tokens was cut by its limit.
        """
        return Trajectory(
            token_ids=np.array(self.token_ids, np.int32),
            mask=np.array(self.mask, np.uint8),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            experts=np.concatenate(self.experts) if self.experts else None,
            turn_ends=np.array(self.turn_ends, np.int32),
            rewards=np.array(self.rewards, np.float32),
            finish=finish,
            finish_reasons=[
                "stop" if self.token_ids[end] in stop_token_ids else "length"
                for end in self.turn_ends
            ],
            greedy=greedy,
            teaching=teaching,
            role=role,
            seed=seed,
            messages=self.messages,
            info=self.info,
            host=host,
            data_source=self.data_source,
            first_token=self.first_token,
            generate_s=self.generate_s,
            environment_s=self.environment_s,
        )

    def _add_experts(self, experts: ExpertRecord) -> None:
        """Take the experts of the tokens that none are known of yet.

        A token keeps those with which it was computed first, as its successor was drawn.
        """
        known = sum(map(len, self.experts))
        computed_from = len(self.token_ids) - 1 - len(experts)
        if computed_from > known:
            raise EngineError(
                f"the engine recorded no experts for the tokens {known} to {computed_from - 1}",
                hint="set algorithm.router_replay=false, and report this",
            )
        self.experts.append(experts[known - computed_from :])

    def _add_given(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
