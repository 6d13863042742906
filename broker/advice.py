"""What holds a run up, in plain words, and what to change: from its profile."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .profile import Profile, Shares

_WAITS = 0.25
"""A learner that waits for less of its time is the bottleneck itself."""
_PARKED = 0.3
_NOTABLE = 0.1
_BUSY_HOST = 0.5


@dataclass(frozen=True)
class Advice:
    """One finding, and the configuration keys and commands that change it."""

    text: str
    change: tuple[str, ...]


def advise(profile: Profile, run: str) -> list[Advice]:
    """Say what holds a run up, what matters most first; never nothing.

    `run` is its name, for commands.
    """
    waited = profile.learner.get("wait", 0.0)
    found = [_learner_waits(profile, run) if waited >= _WAITS else _learner_busy(profile)]
    parked = _parked(profile)
    if parked >= _PARKED and waited < _WAITS:
        found.append(
            Advice(
                f"generators were parked {parked:.0%} of the time by the staleness bound, since "
                "the learner is behind: fewer generators would do",
                (f"tinkermq scale {run} generators=N",),
            )
        )
    for kind, (what, keys) in _OVERHEADS.items():
        share = profile.learner.get(kind, 0.0)
        if share >= _NOTABLE:
            found.append(Advice(f"{what} took {share:.0%} of the learner's time", keys))
    swapping = _mean(profile.generators.values(), "swap")
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


def _learner_busy(profile: Profile) -> Advice:
    busy = 1 - profile.learner.get("wait", 0.0) - profile.learner.get("paused", 0.0)
    text = f"the learner is busy {busy:.0%} of the time: it is the bottleneck"
    text += " (more generators would not help)"
    return Advice(text, ("learner.slots", "learner.threads", "learner.dtype=bfloat16"))


def _learner_waits(profile: Profile, run: str) -> Advice:
    """Name what the learner waits for most; whether the bound or the engine is behind it."""
    waited = profile.learner["wait"]
    mostly = max(profile.waited_for, key=lambda phase: profile.waited_for[phase], default="other")
    says = f"the learner waited {waited:.0%} of the time for rollouts"
    parked = _parked(profile)
    if mostly == "weights" or (parked >= _PARKED and mostly != "environment"):
        return Advice(
            f"{says}, while generators were parked {parked:.0%} of the time by the staleness "
            "bound: raise training.max_staleness or training.batch_size",
            ("training.max_staleness", "training.batch_size"),
        )
    if mostly == "environment":
        return _games_are_slow(profile, run, says)
    if mostly == "queue":
        return Advice(
            f"{says}, mostly for tasks that no generator had room for: add generators, or raise "
            "generator.max_episodes",
            (f"tinkermq scale {run} generators=N", "generator.max_episodes"),
        )
    what = ", mostly for generation" if mostly == "generate" else ""
    return Advice(
        f"{says}{what}: add generators, or raise training.max_staleness",
        (f"tinkermq scale {run} generators=N", "training.max_staleness"),
    )


def _games_are_slow(profile: Profile, run: str, says: str) -> Advice:
    says += f", mostly for games, which answered after {seconds_text(profile.answer_p95_s)} (p95)"
    hosts = _mean(profile.hosts.values(), "play")
    if profile.hosts and hosts < _BUSY_HOST:
        return Advice(
            f"{says}, though their hosts played only {hosts:.0%} of the time: more episodes at a "
            "time would hide it",
            ("generator.max_episodes", "training.max_staleness"),
        )
    return Advice(
        f"{says}: add environment hosts or workers",
        (f"tinkermq scale {run} environments=N", "env.workers"),
    )


def seconds_text(seconds: float) -> str:
    """Return a time with its unit: `1.2 s`, `35 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _parked(profile: Profile) -> float:
    """Share of the generators' time without a task, or with none that their weights allow."""
    many = profile.generators.values()
    return _mean(many, "weights") + _mean(many, "tasks")


def _mean(many: Iterable[Shares], kind: str) -> float:
    shares = [shares.get(kind, 0.0) for shares in many]
    return sum(shares) / len(shares) if shares else 0.0
