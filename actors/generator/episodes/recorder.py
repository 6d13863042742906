"""What is told of episodes as they grow. The recorders here write nothing down.

`recording` has those that do, so that another generator goes on with the episodes.
"""

from dataclasses import dataclass

from ....envs.serving.remote import Start, Started
from .chat import ChatTokenizer
from .transcript import Transcript


@dataclass(frozen=True)
class GameAt:
    """The game of an episode, and where it is played."""

    started: Started
    """Its first prompt, and the host that holds it now."""
    episode: str
    """Its id there."""

    @property
    def host(self) -> str:
        """The environment host."""
        return self.started.host


class EpisodeRecorder:
    """Told of one episode as it grows."""

    follows_tokens = False
    """Whether `note_token` is to be told of each token."""
    keeps_game = False
    """Whether the episode stays at its host when it is over: the recorder sees to its end."""
    num_continued = 0
    """Generated tokens that were not generated again."""

    async def rejoin(
        self, chat: ChatTokenizer, episode: str, start: Start, transcript: Transcript
    ) -> GameAt | None:
        """Find the game that another generator has begun; None: it is to be started.

        `transcript` gets what there is. A game that is played again is so as `episode`.
        """
        del chat, episode, start, transcript

    async def begin(self, transcript: Transcript, game: GameAt) -> None:
        """Take notice that the episode is being played, from its beginning or gone on with."""

    def seed(self, turn: int) -> int | None:
        """Return the seed of a turn's sampling; None: any."""
        del turn

    def note_token(self, transcript: Transcript) -> bool:
        """Take notice of a token of the open turn; False when the episode was taken over."""
        del transcript
        return True

    async def end_turn(self, transcript: Transcript) -> None:
        """Take notice of the end of a turn, before the game is given it."""

    async def settle(self) -> None:
        """Wait for what is being stored; raises what that raises."""

    def stop(self) -> None:
        """Leave off: this try of the episode is over."""


class TaskRecorder:
    """Told of the episodes of one lease of a task."""

    async def open(self, number: int) -> EpisodeRecorder:
        """Return what is told of an episode of the task."""
        del number
        return EpisodeRecorder()

    async def end(self) -> None:
        """Take notice that the task's group is in the log."""
