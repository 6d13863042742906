"""What has been told of one answer: all its parts together, whoever they came from."""

from dataclasses import dataclass, field

from ....schemas.agent import CallDelta, CallPart
from ..dialects.answer import Answered, TokenLogprob


@dataclass(slots=True)
class GatheredChoice:
    """One choice as far as it has come."""

    texts: list[str]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Answered | None = None
    told_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Of each token by itself, where asked for."""

    def add(self, delta: CallDelta) -> None:
        """Take more of it."""
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.versions += delta.versions
        tops = [
            tuple(zip(*top, strict=True))
            for top in zip(delta.top_tokens, delta.top_logprobs, strict=True)
        ]
        tops += [()] * (len(delta.tokens) - len(tops))
        for text, logprob, top in zip(delta.tokens, delta.logprobs, tops, strict=False):
            self.told_logprobs.append(TokenLogprob(text, logprob, top))
        self.finish = delta.finish or self.finish

    def told(self, number: int) -> CallDelta:
        """Return all of it."""
        return CallDelta(
            choice=number,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
        )


class GatheredAnswer:
    """The answer to one call."""

    def __init__(self, num_choices: int) -> None:
        """Begin with nothing."""
        self.head: CallPart | None = None
        """The first part that told anything."""
        self.choices = [GatheredChoice([], [], [], []) for _ in range(num_choices)]
        self.calls: list[int] = []
        """Numbers of the choices among the episode's calls, once it is whole."""
        self.delivery = 0
        """Of the task, as the newest of those who answer has it."""
        self.num_parts = 0
        self.is_whole = False

    def add(self, part: CallPart) -> None:
        """Take the next part."""
        self.num_parts += 1
        self.delivery = max(self.delivery, part.delivery)
        if self.head is None and (part.names or part.last):
            self.head = part
        for delta in part.deltas:
            self.choices[delta.choice].add(delta)
        if part.last:
            self.calls = part.calls
            self.is_whole = True

    @property
    def num_generated(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def begun(self) -> CallPart | None:
        """Return what was told as one part, for who goes on with it; None: nothing was."""
        if self.head is None:
            return None
        deltas = [
            choice.told(number)
            for number, choice in enumerate(self.choices)
            if choice.token_ids or choice.finish
        ]
        whole = {"index": 0, "last": False, "deltas": deltas, "calls": [], "prompt_ids": []}
        return self.head.model_copy(update=whole)
