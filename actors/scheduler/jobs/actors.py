"""Which actors a job is made of, and what they hold.

On a node a slot is a GPU or a CPU share. The learner, each generator and each inference server
compute all the time and hold as many as their configuration says; the evaluator and the
environment hosts hold none, so that a laptop with two cores runs a whole job.
"""

from collections.abc import Sequence

from ....schemas.config.agent import AgentConfig
from ....schemas.config.job import GeneratorConfig, JobConfig
from ....schemas.config.sections import LearnerConfig, model_paths
from ....schemas.control import rank_name
from ....schemas.job import (
    TEACHER_KEY,
    WANDB_KEY,
    ActorPlacement,
    JobRecord,
    Role,
    SecretName,
)
from ....schemas.node import WantedActor
from ....schemas.wire.errors import ConfigError

KINDS = ("train", "sft", "eval", "infer", "tinker")
"""Kinds of jobs that this pool runs."""


def actors_for(config: JobConfig, kind: str) -> list[ActorPlacement]:
    """Return the actors of a job, none of them placed yet; the first carries the job.

    Raises ConfigError for a configuration that does not make a job of this kind.
    """
    hosts = [_actor("environment", f"environment-{i}") for i in range(config.env.hosts)]
    if kind == "eval":
        if not config.env.game:
            raise ConfigError(
                "the configuration names no game to evaluate a model with",
                hint="set env.game, or evaluate the folder like another run: "
                "`tinkermq eval FOLDER --like RUN`",
            )
        return [ActorPlacement(name="evaluator-0", role="evaluator", slots=1), *hosts]
    if kind == "infer":
        return [*_servers(config.generator), *hosts]
    if kind == "tinker":
        if not config.tinker.base:
            raise ConfigError(
                "a service for the Tinker API was submitted without the name of its base model",
                hint="set tinker.base, or submit it with `tinkermq tinker up --model NAME=FOLDER`",
            )
        return [_actor("trainer", "trainer", config.learner.slots), *_samplers(config.generator)]
    if kind == "sft" and not config.sft.data:
        raise ConfigError(
            "an SFT job was submitted without data",
            hint="name files with conversations in sft.data, or submit it with `tinkermq train`",
        )
    actors = _learner(config.learner)
    actors += [
        _actor("generator", f"generator-{i}", config.generator_slots)
        for i in range(config.generator.count)
    ]
    if config.has_evaluator:
        actors.append(_actor("evaluator", "evaluator-0"))
    return actors + hosts


def _learner(config: LearnerConfig) -> list[ActorPlacement]:
    """Return a learner and its other ranks: they are placed all together or not at all."""
    slots = config.slots // config.ranks
    spread = config.spread if config.ranks > 1 else []
    learner = ActorPlacement(name="learner", role="learner", slots=slots, spread=spread)
    return [learner, *(_actor("rank", rank_name(n), slots) for n in range(1, config.ranks))]


def vital(actors: Sequence[ActorPlacement]) -> list[ActorPlacement]:
    """Return those without whose node the whole job is placed anew: the main one, and its ranks."""
    return [main_actor(actors), *(actor for actor in actors if actor.role == "rank")]


def _servers(config: GeneratorConfig) -> list[ActorPlacement]:
    if config.count < 1:
        raise ConfigError(
            "generator.count=0 leaves an inference job without a server",
            hint="it counts the servers of an inference job: set generator.count=1 or more "
            "(`tinkermq serve --servers 1`)",
        )
    return [_actor("server", f"server-{i}", config.slots) for i in range(config.count)]


def _samplers(config: GeneratorConfig) -> list[ActorPlacement]:
    return [_actor("sampler", f"sampler-{i}", config.slots) for i in range(config.count)]


def main_actor(actors: Sequence[ActorPlacement]) -> ActorPlacement:
    """Return the actor whose end is the end of the job: a training's learner, a first server."""
    return actors[0]


def scaled(
    actors: Sequence[ActorPlacement], role: Role, count: int, slots: int = 0
) -> list[ActorPlacement]:
    """Return the actors with `count` of one role: the newest leave first, free names are reused.

    New ones hold `slots` slots each.
    """
    kept: list[ActorPlacement] = []
    left = count
    for actor in actors:
        if actor.role == role:
            if left == 0:
                continue
            left -= 1
        kept.append(actor)
    taken = {actor.name for actor in kept}
    free = (name for i in range(1 + len(taken) + left) if (name := f"{role}-{i}") not in taken)
    return kept + [_actor(role, next(free), slots) for _ in range(left)]


def unplaced(actors: Sequence[ActorPlacement]) -> list[ActorPlacement]:
    """Return the actors as they were before they were given to nodes."""
    return [
        ActorPlacement(name=actor.name, role=actor.role, slots=actor.slots, spread=actor.spread)
        for actor in actors
    ]


def at_rest(actors: Sequence[ActorPlacement]) -> list[ActorPlacement]:
    """Return the actors of a job that has ended: none of them runs."""
    return [
        actor if actor.state == "failed" else actor.model_copy(update={"state": "exited"})
        for actor in actors
    ]


def slots_of(actors: Sequence[ActorPlacement]) -> int:
    """Return the slots that the actors hold together."""
    return sum(actor.slots for actor in actors)


def wanted_actor(record: JobRecord, actor: ActorPlacement, config: JobConfig) -> WantedActor:
    """Return what a node must know to run one actor."""
    threads = {
        "learner": config.learner.threads,
        "rank": config.learner.threads,
        "generator": config.generator.threads,
        "server": config.generator.threads,
        "trainer": config.learner.threads,
        "sampler": config.generator.threads,
    }
    data = [*config.env.train_data, *config.env.val_data]
    return WantedActor(
        user=record.user,
        job=record.job,
        name=actor.name,
        role=actor.role,
        slots=actor.slots,
        devices=actor.devices,
        attempt=record.attempt,
        run_dir=record.run_dir,
        output_roots=record.output_roots,
        reads=data if actor.role == "environment" else [],
        programs=_shown_to_programs(config.agent) if actor.role == "environment" else None,
        own_code=_read_by_own_code(config) if actor.role in ("learner", "rank") else None,
        own_network=not record.output_roots,
        threads=threads.get(actor.role, 1),
        secrets=bool(secrets_of(record, actor)),
        max_restarts=config.limits.max_restarts,
    )


def secrets_of(record: JobRecord, actor: ActorPlacement) -> list[SecretName]:
    """Return what of its owner's secrets an actor of a job needs.

    A learner with functions of an owner who is no admin has no network, so no use for a key.
    """
    of_it: list[SecretName] = []
    is_cut_off = record.has_own_code and bool(record.output_roots)
    if actor.name == main_actor(record.actors).name and not is_cut_off:
        of_it.append(WANDB_KEY)
    if actor.role == "generator":
        of_it.append(TEACHER_KEY)
    return [name for name in of_it if name in record.secrets]


def _read_by_own_code(config: JobConfig) -> list[str] | None:
    """Return what a learner reads that runs functions of its owner; None for one that does not."""
    if not config.own_functions:
        return None
    return [*model_paths(config).values(), *config.sft.data]


def _shown_to_programs(agent: AgentConfig) -> list[str] | None:
    """Return the folders that programs of a job see or are judged by; None for a job of games."""
    named = [agent.files, agent.reward_files, *agent.read]
    return [folder for folder in named if folder is not None] if agent.command else None


def _actor(role: Role, name: str, slots: int = 0) -> ActorPlacement:
    return ActorPlacement(name=name, role=role, slots=slots)
