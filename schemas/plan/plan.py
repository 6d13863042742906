"""Estimates whether a job fits on GPUs, and the time of a step; also used to choose settings.

Memory of each card is the sum of `memory.py`. Times are computed from the card's data sheet and
from efficiencies, measured if a report of `make test-gpu` is given and assumed otherwise. Episodes
count with their maximum length, so times are upper bounds for shorter episodes.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, cast

from ..config.job import JobConfig
from ..config.sections import Dtype, resolve_dtype
from ..wire.errors import ConfigError, PlacementError
from .cards import CardSet, GpuCard, find_card
from .memory import (
    GIB,
    EngineLoad,
    Term,
    adapter_weights,
    engine_terms,
    host_terms,
    learner_terms,
    usable_bytes,
)
from .model_shape import ModelShape
from .settings import (
    EngineSettings,
    GpuUse,
    JobModels,
    LearnerSettings,
    choose_engine_settings,
    choose_gpu_use,
    choose_learner_settings,
    find_engine_load,
    find_learner_load,
    find_models,
    held_bytes,
    with_memory_share,
)

_KIB = 1 << 10

# -- memory of the actors --------------------------------------------------------------------------


@dataclass(frozen=True)
class ActorMemory:
    """The memory of one card of an actor."""

    actor: str
    cards: int
    """Cards of all such actors together."""
    terms: tuple[Term, ...]
    usable_bytes: int
    """What of the card it can have."""
    host_terms: tuple[Term, ...] = ()
    """What one such actor takes of its machine's memory, beside its own process."""

    @property
    def num_bytes(self) -> int:
        """Sum of all terms."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def fits(self) -> bool:
        """Whether it fits on the card."""
        return self.num_bytes <= self.usable_bytes

    @property
    def largest(self) -> Term:
        """The largest term that a key can reduce."""
        return max((term for term in self.terms if term.remedy), key=lambda term: term.num_bytes)


def estimate_memory(
    job: JobConfig,
    models: JobModels,
    card: GpuCard,
    learner: LearnerSettings,
    engine: EngineSettings,
) -> list[ActorMemory]:
    """Return the memory of the cards of each kind of actor."""
    load = find_learner_load(job, models, learner)
    terms, on_host = learner_terms(load), tuple(host_terms(load))
    usable = usable_bytes(card.memory_bytes)
    actors = [ActorMemory("learner", job.learner.slots, tuple(terms), usable, on_host)]
    cards = job.generator.count * job.generator_slots
    if cards:
        held = tuple(engine_terms(find_engine_load(job, models, engine), card.memory_bytes))
        usable = usable_bytes(card.memory_bytes, engine.memory_share)
        actors.append(ActorMemory("generator", cards, held, usable))
    return actors


def refuse_too_large(
    actors: Iterable[ActorMemory], learner: LearnerSettings, card: GpuCard
) -> None:
    """Raise PlacementError for an actor that does not fit on its card.

    The error has the figures, the largest term and the keys that reduce it.
    """
    for actor in actors:
        if actor.fits:
            continue
        largest = actor.largest
        settings = ""
        if actor.actor == "learner":
            settings = f" (micro-batches of {learner.microbatch_tokens} tokens, {learner})"
        raise PlacementError(
            f"a card of the {actor.actor} would hold {_gib(actor.num_bytes)}{settings}, and "
            f"{card.name} has {_gib(actor.usable_bytes)} for it: {largest.name} take "
            f"{_gib(largest.num_bytes)}",
            hint=largest.remedy,
        )


def _refuse_missing_kernels(job: JobConfig, models: JobModels, card: GpuCard) -> None:
    if models.policy.quantization == "fp8" and not card.has_fp8:
        raise PlacementError(
            f"model.path={job.model.path} has FP8 weights, for which {card.name} has no kernels",
            hint="take the model's bfloat16 weights, or cards of Hopper, Ada or later (H100, L40S)",
        )
    kinds = {
        "quantization": job.generator.quantization,
        "kv_cache_dtype": job.generator.kv_cache_dtype,
    }
    for key, kind in kinds.items():
        if kind == "fp8" and not card.has_fp8:
            raise PlacementError(
                f"generator.{key}=fp8, for which {card.name} has no kernels",
                hint=f"remove generator.{key}, or take cards of Hopper, Ada or later (H100, L40S)",
            )
    sections: dict[str, Dtype] = {"learner": job.learner.dtype, "generator": job.generator.dtype}
    for section, dtype in sections.items():
        in_half = resolve_dtype(dtype, on_gpu=True) == "bfloat16"
        if in_half and not card.has_bfloat16:
            raise PlacementError(
                f"{section}.dtype=bfloat16, which {card.name} does not compute with",
                hint=f"set {section}.dtype=float32, or take an A100 or later",
            )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


# -- times -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Efficiencies:
    """The reached shares of a card's data sheet values."""

    learner_of_peak: float = 0.4
    """Operations of the learner over those of the data sheet (MFU)."""
    decode_of_bandwidth: float = 0.8
    """Bytes that decoding reads over those of the data sheet."""
    weights_bytes_per_s: float = 0.0
    """New weights to the generators; 0: by the transport."""
    source: str = "assumed"
    """Where the numbers are from."""


_OBJECT_BYTES_PER_S = 0.4e9
"""Rate of weights through NATS or files, all steps together."""
_LINK_SHARE = 0.5
_PCIE_BYTES_PER_S = 2.5e10
"""Rate between a card and pinned memory."""
DECODE_OVERHEAD_S = {True: 0.5e-3, False: 12e-3}
"""Time of a decoding step besides its reads: with CUDA graphs, and without."""


def read_efficiencies(path: str | Path) -> Efficiencies:
    """Return the efficiencies measured in a report of `make test-gpu`.

    The report is a JSON object with `efficiencies`, an object with some of `learner_of_peak`,
    `decode_of_bandwidth` and `weights_bytes_per_s`. Raises ConfigError for another file.
    """
    names = ("learner_of_peak", "decode_of_bandwidth", "weights_bytes_per_s")
    hint = "give the JSON report that `make test-gpu` writes"
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the report {path} cannot be read: {error}", hint=hint) from error
    fields = cast("dict[str, Any]", report) if isinstance(report, dict) else {}
    entries = fields.get("efficiencies")
    if not isinstance(entries, Mapping):
        raise ConfigError(f"the report {path} has no efficiencies", hint=hint)
    values = {
        name: value for name, value in cast("dict[str, Any]", entries).items() if name in names
    }
    wrong = [name for name, value in values.items() if not _is_positive(value)]
    if wrong or not values:
        raise ConfigError(
            f"the report {path}: efficiencies {wrong or 'without a known name'} must be positive "
            "numbers",
            hint=hint,
        )
    return Efficiencies(**values, source=f"measured, {path}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a training step's parts, and of a step in a run."""

    generation_s: float
    training_s: float
    weights_s: float
    step_s: float
    """From one version to the next: parts overlap unless training is on-policy."""
    mfu: float = 0.0
    """As `ModelUse.mfu` of a run's steps."""


def estimate_times(
    job: JobConfig,
    models: JobModels,
    cards: CardSet,
    learner: LearnerSettings,
    engine: EngineSettings,
    reached: Efficiencies,
) -> StepTimes:
    """Return the times of a step with episodes of maximum length."""
    generation = _generation_s(job, models.policy, cards.card, engine, reached)
    training = _training_s(job, models, cards.card, learner, reached)
    weights = _weights_s(job, models.policy, cards, reached)
    overlaps = job.training.max_staleness != 0 and not shares_card(job, cards.num)
    total = max(generation, training + weights) if overlaps else generation + training + weights
    use = ModelUse.of(job, models, cards.card)
    mfu = 0.0
    if use is not None:
        response = job.rollout.max_prompt_tokens, job.rollout.response_limit
        groups = [[response] * job.rollout.group_size] * job.training.batch_size
        mfu = use.mfu(groups, training)
    return StepTimes(generation, training, weights, total, mfu)


@dataclass(frozen=True)
class ModelUse:
    """The share of a learner's GPUs that trains its policy (MFU, arXiv 2204.02311)."""

    shape: ModelShape
    flops: float
    """Operations per second of all its GPUs, by their data sheet."""
    shares_prompts: bool
    epochs: int
    """Updates by each token."""

    @classmethod
    def of(
        cls, job: JobConfig, models: JobModels | None, card: GpuCard | None
    ) -> "ModelUse | None":
        """Return the use of cards of a kind; None for an unknown card or model."""
        if card is None or models is None or not card.bfloat16_flops or models.policy.is_unknown:
            return None
        rate = _learner_flops(job, card) * job.learner.ranks
        return cls(models.policy, rate, job.learner.share_prompts, job.learner.ppo_epochs)

    def mfu(self, groups: Iterable[Sequence[tuple[int, int]]], seconds: float) -> float:
        """Return the share for groups of responses, each the tokens of its prompt and the others.

        A token takes 3 times its forward pass, 2 N + 2 L A T operations: N weights that read it, L
        layers, A width of all heads, T tokens of its sequence. Recomputed activations, other models
        and padding do not count; a shared prompt counts once.
        """
        forward = 0.0
        for group in groups:
            for number, (prompt, others) in enumerate(group):
                computed = others if number and self.shares_prompts else prompt + others
                forward += computed * _forward_flops(self.shape, prompt + others)
        return 3 * self.epochs * forward / (seconds * self.flops) if seconds > 0 else 0.0


def _learner_flops(job: JobConfig, card: GpuCard) -> float:
    in_half = resolve_dtype(job.learner.dtype, on_gpu=True) == "bfloat16"
    return card.bfloat16_flops if in_half else card.tf32_flops


def _generation_s(
    job: JobConfig, shape: ModelShape, card: GpuCard, engine: EngineSettings, reached: Efficiencies
) -> float:
    generator, rollout = job.generator, job.rollout
    if not generator.count or job.sft.data:
        return 0.0
    width = generator.tensor_parallel
    episodes = job.training.batch_size * rollout.group_size / generator.count
    at_once = max(1.0, min(engine.max_requests, job.episodes_at_once, episodes))
    load = find_engine_load(job, JobModels(shape), engine)
    context = rollout.max_prompt_tokens + rollout.response_limit / 2
    read = shape.active_weights * load.weight_bytes / width + at_once * context * load.token_bytes
    in_half = resolve_dtype(generator.dtype, on_gpu=True) == "bfloat16"
    flops = card.bfloat16_flops if in_half else card.tf32_flops
    computed = 2 * shape.active_weights * at_once / (width * flops * reached.learner_of_peak)
    is_graph = load.is_vllm and load.compiled
    step = max(read / (card.bandwidth * reached.decode_of_bandwidth), computed)
    decoding = episodes / at_once * rollout.response_limit * (step + DECODE_OVERHEAD_S[is_graph])
    prompts = job.training.batch_size / generator.count * rollout.max_prompt_tokens
    prefill = 2 * shape.active_weights * prompts / (width * flops * reached.learner_of_peak)
    return decoding + prefill


def _training_s(
    job: JobConfig,
    models: JobModels,
    card: GpuCard,
    learner: LearnerSettings,
    reached: Efficiencies,
) -> float:
    rollout, tasks = job.rollout, job.training.batch_size
    prompts = tasks * (1 if job.learner.share_prompts else rollout.group_size)
    tokens = prompts * rollout.max_prompt_tokens
    tokens += tasks * rollout.group_size * rollout.response_limit
    again = 1 if learner.gradient_checkpointing else 0
    updates = (3 + again) * job.learner.ppo_epochs
    scored = 1 if job.learner.num_updates > 1 else 0
    forward = _forward_flops(models.policy, rollout.max_tokens)
    flops = forward * (updates + scored)
    for shape in models.frozen:
        flops += _forward_flops(shape, rollout.max_tokens)
    for shape in models.updated:
        flops += _forward_flops(shape, rollout.max_tokens) * (updates + 1)
    computing = flops / (_learner_flops(job, card) * reached.learner_of_peak)
    if learner.offload_activations:  # to host memory and back, each time
        width = models.policy.hidden * find_learner_load(job, models, learner).compute_bytes
        copied = 2 * models.policy.layers * width * job.learner.ppo_epochs
        computing += copied / _PCIE_BYTES_PER_S
    computing *= tokens / job.learner.ranks
    return max(computing, _exchange_s(job, models, card, learner, tokens))


def _exchange_s(
    job: JobConfig, models: JobModels, card: GpuCard, learner: LearnerSettings, tokens: int
) -> float:
    """Return the time in which ranks exchange weights and gradients, beside computing.

    Each pass gathers all weights forwards and backwards, and adds float32 gradients. The links of
    one machine count; between machines it takes longer.
    """
    load = find_learner_load(job, models, learner)
    if load.shards == 1 or not card.link:
        return 0.0
    passes = ceil(tokens / (load.microbatch_tokens * load.ranks / load.context_parallel))
    weights = [models.policy, *models.updated]
    gathered = 2 * load.compute_bytes * sum(shape.weights for shape in weights)
    added = 4 * (load.trained + sum(shape.weights for shape in models.updated))
    share = (load.shards - 1) / load.shards
    moved = passes * job.learner.ppo_epochs * share * (gathered + added)
    return moved / (card.link * _LINK_SHARE)


def _forward_flops(shape: ModelShape, length: int) -> float:
    """Return the operations of one token's forward pass, with causal attention."""
    return 2 * shape.active_weights + 2 * shape.layers * shape.attention_width * length


def _weights_s(job: JobConfig, shape: ModelShape, cards: CardSet, reached: Efficiencies) -> float:
    if not job.generator.count or job.sft.data:
        return 0.0
    width = 4 if job.published_dtype(on_gpu=True) == "float32" else 2
    num_bytes = (adapter_weights(job, shape) or shape.weights) * width
    link, transport = cards.card.link * _LINK_SHARE, job.weights.transport
    copied = num_bytes / _PCIE_BYTES_PER_S  # of the GPU, into the machine's memory
    if job.learner.ranks > 1 and link:
        copied += num_bytes / link  # gathered from the ranks
    rate = _OBJECT_BYTES_PER_S
    if shares_card(job, cards.num):
        rate = _PCIE_BYTES_PER_S
    elif transport in ("auto", "nccl") and link:
        rate = min(_PCIE_BYTES_PER_S, link)
    return copied + num_bytes / (reached.weights_bytes_per_s or rate)


# -- a plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The estimate for a job on some cards."""

    cards: CardSet
    models: JobModels
    learner: LearnerSettings
    engine: EngineSettings
    load: EngineLoad
    actors: list[ActorMemory]
    times: StepTimes
    reached: Efficiencies
    refusal: PlacementError | None
    """Why it cannot run there."""
    shares_card: bool = False
    """Whether learner and generator are on one card."""
    use: GpuUse | None = None
    """How they share it, if they fit."""

    @property
    def is_vllm(self) -> bool:
        """Whether generators compute with vLLM."""
        return self.load.is_vllm

    def to_map(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "gpus": str(self.cards),
            "shares_card": self.shares_card,
            "engine_sleeps": self.use is not None and self.use.sleeps,
            "fits": self.refusal is None,
            "error": None if self.refusal is None else self.refusal.message,
            "hint": None if self.refusal is None else self.refusal.hint,
            "model": {
                "weights": self.models.policy.weights,
                "layers": self.models.policy.layers,
                "hidden": self.models.policy.hidden,
            },
            "request": {
                "token_bytes": self.load.token_bytes,
                "state_bytes": self.load.state_bytes,
                "snapshots": self.load.num_snapshots,
            },
            "settings": self._settings(),
            "actors": [_actor_map(actor) for actor in self.actors],
            "seconds": {
                "generation": self.times.generation_s,
                "training": self.times.training_s,
                "weights": self.times.weights_s,
                "step": self.times.step_s,
                "efficiencies": self.reached.source,
            },
            "mfu": self.times.mfu,
        }

    def lines(self) -> list[str]:
        """Return the figures as text lines."""
        shape = self.models.policy
        lines = [f"{self.cards}, a model of {shape.weights / 1e9:.2f} B weights"]
        for actor in self.actors:
            verdict = "fits" if actor.fits else "does not fit"
            lines.append(
                f"{actor.actor}, {actor.cards} card(s): {_gib(actor.num_bytes)} of "
                f"{_gib(actor.usable_bytes)} on each, {verdict}"
            )
            order = sorted(actor.terms, key=lambda term: -term.num_bytes)
            lines += [f"  {term.num_bytes / GIB:7.2f} GiB  {term.name}" for term in order]
            if actor.actor == "generator" and (request := self._request()):
                lines.append(f"  {request}")
            lines.append(f"  largest: {actor.largest.name}; {actor.largest.remedy}")
            if actor.host_terms:
                on_host = (f"{_gib(term.num_bytes)} {term.name}" for term in actor.host_terms)
                lines.append(f"  of the machine's memory, for each rank: {', '.join(on_host)}")
        if self.use is not None:
            sleeps = (
                "sleeps while the learner trains"
                if self.use.sleeps
                else "generates while the learner trains"
            )
            lines.append(f"both share the card: the engine {sleeps}")
        settings = (
            f"{key}={json.dumps(value)}"
            for key, value in self._settings().items()
            if (key.startswith("learner.") or len(self.actors) > 1)
            and (self.is_vllm or key != "generator.max_batched_tokens")
            and not (value is None or (value is False and key == "learner.offload_activations"))
        )
        lines.append(f"settings: {', '.join(settings)}")
        times = self.times
        lines.append(
            f"a step: {times.step_s:.1f} s (generation {times.generation_s:.1f} s, training "
            f"{times.training_s:.1f} s, weights {times.weights_s:.1f} s; MFU {times.mfu:.0%}), by "
            f"the card's data sheet and efficiencies that are {self.reached.source}, episodes at "
            "their longest"
        )
        return lines

    def _request(self) -> str:
        """Return what a request holds, of a model with more than keys and values of all tokens."""
        load, cache = self.load, self.models.policy.cache
        if not (load.state_bytes or cache.is_latent or cache.window):
            return ""
        held = f"a request holds {load.token_bytes / _KIB:.4g} KiB a token"
        if cache.window and not self.is_vllm:
            held += f", all tokens in layers with a window of {cache.window}, too"
        if load.state_bytes:
            held += f", {load.state_bytes / _KIB:.4g} KiB of recurrent states"
            if not self.is_vllm:
                held += f"; earlier turns hold {load.num_snapshots} of half the context"
        return held

    def _settings(self) -> dict[str, int | float | None]:
        """Return the keys and values with which the job runs."""
        return {
            "learner.microbatch_tokens": self.learner.microbatch_tokens,
            "learner.gradient_checkpointing": self.learner.gradient_checkpointing,
            "learner.offload_activations": self.learner.offload_activations,
            "generator.max_requests": self.engine.max_requests,
            "generator.max_batched_tokens": self.engine.batched_tokens,
            "generator.memory_share": self.engine.memory_share,
        }


def _actor_map(actor: ActorMemory) -> dict[str, Any]:
    return {
        "actor": actor.actor,
        "cards": actor.cards,
        "bytes": actor.num_bytes,
        "usable_bytes": actor.usable_bytes,
        "fits": actor.fits,
        "largest": actor.largest.name,
        "remedy": actor.largest.remedy,
        "terms": {term.name: term.num_bytes for term in actor.terms},
        "host_terms": {term.name: term.num_bytes for term in actor.host_terms},
    }


def make_plan(
    job: JobConfig, models: JobModels, cards: CardSet, reached: Efficiencies | None = None
) -> Plan:
    """Return the estimate for a job on some cards, and why it cannot run there, if so."""
    reached = reached or Efficiencies()
    shared, card = shares_card(job, cards.num), cards.card
    learner = choose_learner_settings(job, models, card, shared=shared)
    refusal = use = None
    alone = job
    try:
        refuse_too_few(job, cards)
        _refuse_missing_kernels(job, models, card)
        if shared:
            use = choose_gpu_use(job, held_bytes(job, models, card, learner), card.memory_bytes)
            alone = with_memory_share(job, use.memory_share)
    except PlacementError as error:
        refusal = error
    except ConfigError as error:
        refusal = PlacementError(error.message, hint=error.hint)
    engine = choose_engine_settings(alone, models, card)
    actors = estimate_memory(job, models, card, learner, engine)
    try:
        refuse_too_large(actors, learner, card)
    except PlacementError as error:
        refusal = error
    return Plan(
        cards,
        models,
        learner,
        engine,
        find_engine_load(job, models, engine),
        actors,
        estimate_times(job, models, cards, learner, engine, reached),
        reached,
        refusal,
        shared,
        use,
    )


def shares_card(job: JobConfig, num_cards: int) -> bool:
    """Return whether learner and generator of a job share a card, given the number of cards."""
    return job.may_colocate and (job.placement == "colocated" or num_cards == 1)


def needed_cards(job: JobConfig, num_cards: int) -> int:
    """Return the number of cards for a job's learner and generators, given those available."""
    if shares_card(job, num_cards):
        return 1
    return job.learner.slots + job.generator.count * job.generator_slots


def refuse_too_few(job: JobConfig, cards: CardSet) -> None:
    """Raise PlacementError for actors that need more cards than available, without sharing."""
    needed = needed_cards(job, cards.num)
    if needed <= cards.num:
        return
    raise PlacementError(
        f"the run needs {needed} cards, {job.learner.slots} for the learner and "
        f"{needed - job.learner.slots} for generators, and {cards} has {cards.num}: these "
        "cannot share a card",
        hint="lower learner.slots, generator.count or generator.slots, take more cards, or set "
        "placement=colocated for one learner and one generator of one slot each",
    )


# -- the cards of a pool ---------------------------------------------------------------------------


def plan_for_pool(job: JobConfig, gpus: Iterable[tuple[str, int]]) -> Plan | None:
    """Return a job's plan on the first of a pool's kinds of GPUs that fits, else on the first.

    `gpus` are model and memory of each GPU; their number is ignored. None for unknown GPUs or
    models.
    """
    there = list(gpus)
    kinds = dict.fromkeys(there)
    models = find_models(job) if kinds and not job.tinker.base else None
    if models is None:
        return None
    plans: list[Plan] = []
    for name, memory_bytes in kinds:
        try:
            card = find_card(name, memory_bytes)
        except ConfigError:
            return None
        cards = CardSet(card, 1, needed_cards(job, len(there)))
        plans.append(make_plan(job, models, cards))
    return next((plan for plan in plans if plan.refusal is None), plans[0])
