"""Going on with an episode that another generator began: its game first.

Where the environment host still holds the episode, its last turn is given to it once more, which
repeats its answer or, if it had not come to that, plays it. A host that is gone, or has freed the
episode, is made up for by a reset with the same seed on any host and the recorded turns: with a
game that answers them as it did before nothing is lost. With another one the episode starts again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ....envs.game import StepResult
from ....envs.serving.remote import Environments, HostGone, Start, Started
from ....schemas.segment import Segment
from ....schemas.wire.errors import NotFoundError, StateError, TinkermqError
from ..engine.engine import Drawn
from .chat import ChatTokenizer
from .recorder import GameAt
from .transcript import Transcript


@dataclass(frozen=True)
class Recorded:
    """An episode as its last holder wrote it down."""

    episode: str
    """Its id at the environment host."""
    host: str
    seed: int
    transcript: Transcript
    """Without messages but the observations, images and data source: the game's host has them."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "Recorded | None":
        """Put segments together; None when nothing was generated."""
        if not any(segment.mask.any() for segment in segments):
            return None
        made = Transcript()
        for segment in segments:
            made.token_ids += segment.token_ids.tolist()
            made.mask += segment.mask.tolist()
            made.logprobs += segment.logprobs.tolist()
            made.versions += segment.versions.tolist()
            made.turn_ends += segment.turn_ends
            made.rewards += segment.rewards
            made.observations += segment.observations
        made.num_prompt = made.mask.index(1)
        if not made.awaits_answer:
            _reopen(made)
        last = segments[-1]
        return cls(last.episode, last.host, last.seed, made)


def _reopen(made: Transcript) -> None:
    """Take the tokens behind the last prompt or observation as those of the open turn."""
    closed = len(made.mask)
    while made.mask[closed - 1]:
        closed -= 1
    columns = (made.token_ids, made.logprobs, made.versions)
    tokens = zip(*(column[closed:] for column in columns), strict=True)
    made.open = [Drawn(*token) for token in tokens]
    for column in (*columns, made.mask):
        del column[closed:]


async def find_game(
    environments: Environments, chat: ChatTokenizer, recorded: Recorded, episode: str, start: Start
) -> GameAt:
    """Find the game of a recorded episode, or play it again as `episode`.

    Raises HostGone when neither is possible, GameError when the game failed.
    """
    try:
        started = await environments.rejoin(recorded.host, recorded.episode, start)
        await _check(environments, chat, recorded, started, recorded.episode, last_only=True)
        return GameAt(started, recorded.episode)
    except (HostGone, NotFoundError, StateError):
        environments.close(recorded.host, recorded.episode)
        started = await environments.reset(episode, start)
        try:
            await _check(environments, chat, recorded, started, episode, last_only=False)
        except TinkermqError:
            environments.close(started.host, episode)
            raise
        return GameAt(started, episode)


async def _check(
    environments: Environments,
    chat: ChatTokenizer,
    recorded: Recorded,
    started: Started,
    episode: str,
    *,
    last_only: bool,
) -> None:
    """Give the game its turns, or the last one, and compare what it says with the record."""
    made = recorded.transcript
    prompt = chat.first_prompt(started.messages, started.tools).tolist()
    if prompt != made.token_ids[: made.num_prompt]:
        raise _diverged(recorded, "another first prompt")
    num_turns = len(made.turn_ends)
    for turn in range(max(0, num_turns - 1) if last_only else 0, num_turns):
        text = chat.answer(*made.turn(turn))
        reply = await environments.step(started.host, episode, turn, text)
        if turn < len(made.rewards) and not _same(reply, made, turn):
            raise _diverged(recorded, f"another answer to turn {turn}")


def _same(reply: StepResult, made: Transcript, turn: int) -> bool:
    said = {"role": reply.role, "content": reply.observation}
    same = said == made.observations[turn] and reply.reward == made.rewards[turn]
    return same and not reply.done


def _diverged(recorded: Recorded, how: str) -> HostGone:
    return HostGone(
        f"episode {recorded.episode} cannot be continued: host {recorded.host} no longer holds it, "
        f"and the game, played again, gave {how}",
        hint="the episode starts again",
    )


def retell(made: Transcript, chat: ChatTokenizer, started: Started) -> None:
    """Complete a recorded transcript with the messages of its first prompt and of its turns."""
    observations = list(made.observations)
    prompt = made.token_ids[: made.num_prompt]
    told = Transcript()
    told.begin(prompt, started.messages, started.data_source)
    made.messages, made.images = told.messages, told.images
    made.data_source = told.data_source
    for turn in range(len(made.turn_ends)):
        made.say(chat.answer(*made.turn(turn)))
        made.messages += observations[turn : turn + 1]
