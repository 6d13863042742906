"""Games for tests of the whole stack: importable, so that environment hosts find them."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.envs.games.guess import GuessGame

from tests.support import hostile


class SlowBandit(BanditGame):
    """A bandit whose step takes time: `delay_s`, and for some episodes a tail on top.

    It takes none any more once the file `until` is there.
    """

    def __init__(
        self,
        delay_s: float = 0.05,
        tail_s: float = 0.0,
        tail_share: float = 0.0,
        until: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._until = until
        self._delay_s = delay_s
        self._tail_s = tail_s
        self._tail_share = tail_share

    def step(self, action: str) -> StepResult:
        """Take time, then pull the arm."""
        is_straggler = self.rng.random() < self._tail_share
        if not (self._until and Path(self._until).exists()):
            time.sleep(self._delay_s + (self._tail_s if is_straggler else 0.0))
        return super().step(action)


class SlowGuess(GuessGame):
    """Guess the number, slowly; a try earns a little by its first character, too."""

    def __init__(self, delay_s: float = 0.03, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._delay_s = delay_s

    def step(self, action: str) -> StepResult:
        """Take time, then compare."""
        time.sleep(self._delay_s)
        result = super().step(action)
        result.reward += 0.1 * (ord(action[:1] or " ") % 8)
        return result


class ToldBandit(SlowBandit):
    """A bandit that tells the answer at the end, for a teacher to read."""

    def step(self, action: str) -> StepResult:
        """Pull the arm, and tell which one pays."""
        result = super().step(action)
        result.info["solution"] = f"arm {self.best_arm()}"
        return result


def odd_lengths(group: Any) -> bool:
    """A filter that leaves out about half of the groups."""
    return int(group.lengths_E.sum()) % 2 == 1


class FirstLetter(BanditGame):
    """Pays for a first letter that a random model draws about half of the time."""

    def step(self, action: str) -> StepResult:
        """Judge the first character: 1 for the lower half of the bytes, else 0."""
        return StepResult("", float(bool(action) and ord(action[0]) < 128), done=True)


class AnyArm(BanditGame):
    """Pays for every arm, and nothing for giving up."""

    def step(self, action: str) -> StepResult:
        """Judge whether an arm was pulled."""
        return StepResult("", float(action in set("0123456")), done=True)


class WithTool(BanditGame):
    """Offers a tool that nobody needs."""

    def get_tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "look", "parameters": {}}}]


class Snoop(BanditGame):
    """Rewards what it can do to others: read files by a pattern, `|` for `/`, and more tries."""

    def __init__(self, pattern: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pattern = pattern.replace("|", "/")

    def came_off(self) -> int:
        """Return how many of its tries came off."""
        found = [*Path("/").glob(self.pattern.lstrip("/"))]
        found += [
            one for one in Path("/proc").glob("[0-9]*/environ") if b"learner" in command_of(one)
        ]
        return len(found) + hostile.count()

    def step(self, action: str) -> StepResult:
        came_off = self.came_off()
        return StepResult(f"{came_off} came off", float(came_off), done=True)


def command_of(environ: Path) -> bytes:
    """Return the command line of a process whose environment may be read, else nothing."""
    try:
        return environ.with_name("cmdline").read_bytes() if environ.read_bytes() else b""
    except OSError:
        return b""


class RaisesInStep(BanditGame):
    """Fails at every step."""

    def step(self, action: str) -> StepResult:
        """Raise, as a game with a mistake does."""
        raise ValueError(f"no rule for {len(action)} letters")


class DuetGame(AbstractGame):
    """Two voices take four turns; whatever they say is passed on as its length."""

    roles = ("high", "low")

    def __init__(self, per_letter: float = 0.0) -> None:
        self._per_letter = per_letter

    def reset(self, **_: Any) -> str:
        """Let one of them begin."""
        self.turns, self.role = 0, self.rng.choice(self.roles)
        return ""

    def step(self, action: str) -> StepResult:
        """1 to who sings, and more by the letter, and 2 to who listens, at every turn."""
        listener = self.roles[self.role == "high"]
        self.turns += 1
        self.role = listener
        rewards = {listener: 2.0}
        reward = 1.0 + self._per_letter * len(action)
        return StepResult(f"heard {len(action)}", reward, self.turns == 4, rewards=rewards)

    def get_system_prompt(self) -> str:
        """Name the voice."""
        return f"you are {self.role}"

    def get_initial_user_message(self) -> str:
        """Say what to do."""
        return "sing"


class AloneGame(DuetGame):
    """The same for one."""

    roles = ()


def no_reward(**_: Any) -> float:
    """Fail, as a reward function with a mistake does."""
    raise LookupError("no rubric for this")


def same_reward(**_: Any) -> float:
    """Say the same of every answer."""
    return 0.5


class EchoGame(AbstractGame):
    """Takes four turns; says how long each was, beside a number that its seed decides."""

    def reset(self, **_: Any) -> str:
        """Begin."""
        self.turns = 0
        return ""

    def step(self, action: str) -> StepResult:
        """Earn by the letter."""
        self.turns += 1
        said = f"{len(action)} {self.rng.randrange(100)}"
        return StepResult(said, 0.1 * len(action), self.turns == 4, {"turns": self.turns})

    def get_system_prompt(self) -> str:
        """Say nothing much."""
        return "echo"

    def get_initial_user_message(self) -> str:
        """Ask."""
        return f"say {self.rng.randrange(10)}"


class TwiceEcho(EchoGame):
    """Says what it says as the results of two calls."""

    def step(self, action: str) -> StepResult:
        """Answer with two messages of a tool."""
        result = super().step(action)
        results = [result.observation, f"{self.rng.randrange(100)}"]
        return StepResult("", result.reward, result.done, result.info, "tool", tool_results=results)


class EndsEarly(EchoGame):
    """Earns at its end only, also where a limit ends it."""

    def step(self, action: str) -> StepResult:
        """Earn nothing yet."""
        result = super().step(action)
        result.reward = 0.0
        return result

    def finish_early(self) -> StepResult:
        """Earn by the turn."""
        return StepResult("", 10.0 + self.turns, done=True, info={"cut_after": self.turns})


class HeldEcho(EchoGame):
    """Takes its third turn once the file `until` is there."""

    def __init__(self, until: str) -> None:
        self._until = Path(until)

    def step(self, action: str) -> StepResult:
        """Wait for the file, then answer."""
        while self.turns == 2 and not self._until.exists():
            time.sleep(0.02)
        return super().step(action)


class CoinGame(EchoGame):
    """Goes on for as long as what is said begins with an upper half of the letters."""

    def step(self, action: str) -> StepResult:
        """End for half of the first letters; 1 for each turn."""
        result = super().step(action)
        return StepResult(result.observation, 1.0, ord(action[:1] or " ") < 128)


class MoodyGame(EchoGame):
    """Says each time something else."""

    moods = itertools.count()

    def step(self, action: str) -> StepResult:
        """Tell the mood beside what was heard."""
        result = super().step(action)
        result.observation += f" {next(self.moods)}"
        return result


class FragileBandit(BanditGame):
    """A bandit that hangs for every second letter that it is told."""

    async def step(self, action: str) -> StepResult:  # pyright: ignore[reportIncompatibleMethodOverride]  # a game may be async
        """Hang, or pull the arm."""
        if ord(self.parse_action(action)[:1] or "0") % 2:
            await asyncio.sleep(600)
        return super().step(action)


class ScoredBandit(BanditGame):
    """A bandit that tells two numbers, of which its reward is none."""

    def step(self, action: str) -> StepResult:
        """Tell what was paid, and how short it was said."""
        result = super().step(action)
        told = {"paid": result.reward, "short": -len(action)}
        return StepResult("", result.reward, done=True, info=told)
