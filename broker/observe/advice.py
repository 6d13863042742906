"""What holds a run up, in plain words, and what to change: from its profile."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .profile import Profile, mean_share

_WAITS = 0.25
"""A learner that waits for less of its time is the bottleneck itself."""
_HELD_BACK = 0.3
_NOTABLE = 0.1
_FULL_HOST = 0.5
_ALL_BUSY = 0.9


@dataclass(frozen=True)
class Advice:
    """One finding, and the configuration keys and commands that change it."""

    text: str
    change: tuple[str, ...]


def advise(
    profile: Profile,
    run: str,
    bound: str = "training.max_staleness",
    *,
    cores_busy: float = 0.0,
) -> list[Advice]:
    """Say what holds a run up, what matters most first; never nothing.

    `run` is its name, for commands, `bound` the key that bounds the staleness. `cores_busy` is the
    share of a machine's cores that were busy, where all of the run is on that machine.
    """
    waited = profile.learner.get("wait", 0.0)
    if waited < _WAITS:
        found = [_learner_busy(profile)]
    elif cores_busy >= _ALL_BUSY and _mostly(profile) != "weights":
        found = [_machine_busy(waited, cores_busy, run)]
    else:
        found = [_learner_waits(profile, run, bound)]
    held_back = profile.held_back
    if held_back >= _HELD_BACK and waited < _WAITS:
        found.append(
            Advice(
                f"generators were held back {held_back:.0%} of the time by the staleness bound, "
                "since the learner is behind: fewer generators would do",
                (f"tinkermq scale {run} generators=N",),
            )
        )
    for kind, (what, keys) in _OVERHEADS.items():
        share = profile.learner.get(kind, 0.0)
        if share >= _NOTABLE:
            found.append(Advice(f"{what} took {share:.0%} of the learner's time", keys))
    swapping = mean_share(profile.generators.values(), "swap")
    if swapping >= _NOTABLE:
        text = f"generators stood still {swapping:.0%} of the time to swap weights in"
        found.append(Advice(text, ("generator.kv_on_swap=keep", "lora.rank")))
    return found


_OVERHEADS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "checkpoint": ("writing checkpoints", ("training.save_freq",)),
    "publish": (
        "publishing weights (the version before was still being sent, or the copy took long)",
        ("weights.transport=file", "learner.publish_dtype=bfloat16", "lora.rank"),
    ),
}


def bound_key(config: Mapping[str, Any]) -> str:
    """Return the key that bounds the staleness in a run's configuration."""
    training: Mapping[str, Any] = config.get("training") or {}
    is_auto = training.get("max_staleness") == "auto"
    return "training.staleness_limit" if is_auto else "training.max_staleness"


def _learner_busy(profile: Profile) -> Advice:
    busy = 1 - profile.learner.get("wait", 0.0) - profile.learner.get("paused", 0.0)
    text = f"the learner is busy {busy:.0%} of the time: it is the bottleneck"
    text += " (more generators would not help)"
    return Advice(text, ("learner.ranks", "learner.threads", "learner.dtype=bfloat16"))


def _machine_busy(waited: float, cores_busy: float, run: str) -> Advice:
    """Say that more actors on the same machine would only share its cores."""
    return Advice(
        f"the learner waited {waited:.0%} of the time for rollouts, and the cores of this machine "
        f"are {cores_busy:.0%} busy: more generators here would not help; add a machine, or make "
        "the work smaller",
        (f"a node on another machine, then tinkermq scale {run} generators=N", "learner.threads"),
    )


def _mostly(profile: Profile) -> str:
    """Return what the groups were at most that the learner waited for."""
    return max(profile.waited_for, key=lambda phase: profile.waited_for[phase], default="other")


def _learner_waits(profile: Profile, run: str, bound: str) -> Advice:
    """Name what the learner waits for most; whether the bound or the engine is behind it."""
    waited = profile.learner["wait"]
    mostly = _mostly(profile)
    says = f"the learner waited {waited:.0%} of the time for rollouts"
    held_back = profile.held_back
    if not profile.generators:
        return Advice(f"{says}; whoever makes them tells nothing of its own time", (bound,))
    if mostly == "weights" or (held_back >= _HELD_BACK and mostly != "environment"):
        return Advice(
            f"{says}, while generators were held back {held_back:.0%} of the time by the staleness "
            f"bound: raise {bound} or training.batch_size",
            (bound, "training.batch_size"),
        )
    if mostly == "environment":
        return _games_are_slow(profile, run, says, bound)
    if mostly == "queue":
        return Advice(
            f"{says}, mostly for tasks that no generator had room for: add generators, or raise "
            "generator.max_episodes",
            (f"tinkermq scale {run} generators=N", "generator.max_episodes"),
        )
    says += ", mostly for generation" if mostly == "generate" else ""
    if held_back >= _NOTABLE:
        return Advice(
            f"{says}, and generators were held back {held_back:.0%} of the time by the staleness "
            f"bound: add generators, or raise {bound}",
            (f"tinkermq scale {run} generators=N", bound),
        )
    return Advice(f"{says}: add generators", (f"tinkermq scale {run} generators=N",))


def _games_are_slow(profile: Profile, run: str, says: str, bound: str) -> Advice:
    """Tell games that wait for a worker from games that take their time."""
    says += f", mostly for games, which answered after {seconds_text(profile.answer_p95_s)} (p95)"
    full = mean_share(profile.hosts.values(), "full")
    if profile.hosts and full < _FULL_HOST:
        return Advice(
            f"{says}, though their hosts had workers free {1 - full:.0%} of the time: more "
            f"episodes at a time hide it: raise {bound}",
            (bound, "generator.max_episodes"),
        )
    return Advice(
        f"{says}: add environment hosts or workers",
        (f"tinkermq scale {run} environments=N", "env.workers"),
    )


def seconds_text(seconds: float) -> str:
    """Return a time with its unit: `1.2 s`, `35 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
