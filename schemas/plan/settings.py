"""Automatic settings: how learner and engine compute on a card, alone or together.

The plan and the actors use the same code to choose them, from the estimates of `memory.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any, NamedTuple

from ..config.job import JobConfig
from ..config.sections import resolve_dtype
from ..wire.errors import ConfigError, ModelError
from . import memory, model_refusals, model_shape
from .cache_shape import text_config
from .cards import GpuCard

_MICROBATCHES = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024, 512)
"""Token counts to try for a forward and backward pass, largest first."""
_WITHOUT_CHECKPOINTING = 8192
"""With fewer tokens a pass, recomputing activations is faster."""
_CHOSEN_SHARE = 0.9
"""Share of a card's usable memory for chosen settings, as estimates are inexact."""
_SHARED_PASSES = 0.25
"""Share of a card, shared by learner and engine, for activations and logits."""
_LARGE_CARD = 70 * memory.GIB
_LARGE_REQUESTS, _SMALL_REQUESTS = 1024, 256
_LARGE_BATCHED, _SMALL_BATCHED = 16384, 8192
"""Requests, and tokens of a pass, of an engine limited by neither memory nor the job: vLLM's own
defaults for throughput."""
_CONTEXT_SHARE = 0.06
"""Share of a card, shared by learner and engine, for the CUDA contexts, libraries and graphs of
both."""
_UNKNOWN_PASSES = 0.25
"""Share of a card for activations and logits of a model with only its number of weights known."""
_LEAST_CACHE_SHARE = 0.1
"""Least share of a card, shared by learner and engine, for keys and values."""
_MOST_SHARE = 0.9
"""Largest share of such a card for the engine."""


# -- the models of a job ---------------------------------------------------------------------------


@dataclass(frozen=True)
class JobModels:
    """The shapes of all models that a job loads."""

    policy: model_shape.ModelShape
    updated: tuple[model_shape.ModelShape, ...] = ()
    """The critic and the policies of other roles."""
    roles: tuple[model_shape.ModelShape, ...] = ()
    """The policies of other roles, which generators load, too."""
    frozen: tuple[model_shape.ModelShape, ...] = ()
    """The reference and teachers that the learner loads."""
    adapter: int | None = None
    """Weights of the adapter, if they were counted; None: they follow from the shape."""


def counted_models(job: JobConfig, *, weights: int, trained: int, critics: int = 0) -> JobModels:
    """Return a job's models if only the policy's numbers of weights are known.

    `weights` counts the policy with its adapter; `trained` of them are trained.
    """
    adapter = trained if trained < weights else 0
    policy = model_shape.unknown_shape(weights - adapter)
    has_reference = job.algorithm.kl_coef > 0 and not job.lora.rank
    return JobModels(
        policy,
        updated=(model_shape.unknown_shape(critics),) if critics else (),
        frozen=(policy,) if has_reference else (),
        adapter=adapter,
    )


def find_models(job: JobConfig) -> JobModels | None:
    """Return the shapes of a job's models; None if one is unknown."""
    algorithm = job.algorithm
    critic = [job.critic.path or job.model.path] if algorithm.advantage == "gae" else []
    has_reference = algorithm.kl_coef and (algorithm.reference.path or not job.lora.rank)
    reference = [algorithm.reference.path or job.model.path] if has_reference else []
    frozen = [*reference, *algorithm.loaded_teachers.values()]
    try:
        policy = model_shape.find_shape(job.model.path)
        roles = _shapes(job.policies.values())
        updated, others = _shapes(critic), _shapes(frozen)
    except ModelError:
        return None
    if policy is None or roles is None or updated is None or others is None:
        return None
    return JobModels(policy, (*updated, *roles), roles, others)


def _shapes(paths: Iterable[str]) -> tuple[model_shape.ModelShape, ...] | None:
    shapes = [model_shape.find_shape(path) for path in paths]
    known = tuple(shape for shape in shapes if shape is not None)
    return known if len(known) == len(shapes) else None


def refuse_models(job: JobConfig, *, trains: bool = True) -> None:
    """Raise ModelError for a model of a job that cannot be used, as its config.json says.

    Such as one without a decoder, or with fewer positions than the job's sequences; ConfigError for
    keys of the learner that do not fit its layers. A model without a local config.json passes: the
    job's actors check it. Services of the Tinker API use the lengths of each request, and
    conversations without validation the lengths of their rows.
    """
    algorithm = job.algorithm
    played = [job.model.path, *job.policies.values()]
    scored = [job.critic.path, algorithm.reference.path, *algorithm.loaded_teachers.values()]
    needed = [(path, _max_context(job)) for path in played]
    needed += [(path, job.rollout.max_tokens) for path in scored if path is not None]
    is_bounded = not job.tinker.base and (not job.sft.data or job.validates)
    for path, max_tokens in needed:
        config = model_shape.find_config(path)
        if config is None:
            continue
        model_refusals.refuse_without_decoder(path, config)
        if trains or job.generator.engine == "transformers":
            model_refusals.refuse_quantised(path, config)
        model_refusals.refuse_long_windows(path, config)
        if trains:
            _refuse_layers(job, config)
        if path in played and job.generator.count and job.generator.engine == "vllm":
            stays = bool(job.lora.rank) or not trains
            model_refusals.refuse_in_vllm(path, config, adapts=stays)
        if is_bounded:
            positions = model_shape.count_positions(config)
            model_shape.refuse_long_sequences(path, max_tokens, positions)


def _refuse_layers(job: JobConfig, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of the learner that do not fit a model's layers."""
    text, size = text_config(config), job.learner.context_parallel
    reason = model_refusals.needs_masks(text)
    model_refusals.refuse_without_masks(job.model.attn_implementation, reason)
    if size > 1:
        model_refusals.refuse_dividing(text, size)


# -- settings --------------------------------------------------------------------------------------


class LearnerSettings(NamedTuple):
    """A learner's settings, as configured or chosen for a card."""

    microbatch_tokens: int
    gradient_checkpointing: bool
    offload_activations: bool = False

    def __str__(self) -> str:
        """Format for people."""
        again = "with" if self.gradient_checkpointing else "without"
        offloaded = ", activations offloaded" if self.offload_activations else ""
        return f"{again} gradient checkpointing{offloaded}"


@dataclass(frozen=True)
class EngineSettings:
    """An engine's settings, as configured or chosen for a card."""

    max_requests: int
    batched_tokens: int
    """Tokens of one forward pass of vLLM."""
    memory_share: float | None
    """Of the card, for all engines of a generator; None: what is free."""


def choose_learner_settings(
    job: JobConfig, models: JobModels | None, card: GpuCard, *, shared: bool = False
) -> LearnerSettings:
    """Return the settings of a learner on cards of this kind; `auto` keys are chosen.

    A pass has as many tokens as fit; activations are recomputed only if few would fit otherwise,
    and offloaded only if none would. If nothing fits, the settings with the least memory are
    chosen. On a card `shared` with an engine, activations and logits take at most a quarter. Of
    unknown models a pass has one row, and activations are recomputed.
    """
    learner = job.learner
    configured = learner.microbatch_tokens
    sizes = [tokens for tokens in _MICROBATCHES if tokens > learner.max_row_tokens]
    sizes = [*sizes, learner.max_row_tokens] if configured == "auto" else [configured]
    ways = _ways_of_activations(job, sizes[-1])
    if models is None:
        return next((way for way in ways if way.gradient_checkpointing), ways[-1])
    usable = _CHOSEN_SHARE * memory.usable_bytes(card.memory_bytes)
    for way in ways:
        for tokens in sizes:
            is_slow = tokens < _WITHOUT_CHECKPOINTING and tokens != sizes[0]
            if is_slow and not way.gradient_checkpointing and len(ways) > 1:
                break
            settings = way._replace(microbatch_tokens=tokens)
            terms = _terms(job, models, settings)
            passing = sum(term.num_bytes for term in terms if term.name in memory.PASSING)
            if shared and passing > _SHARED_PASSES * card.memory_bytes:
                continue
            if sum(term.num_bytes for term in terms) <= usable:
                return settings
    return ways[-1]


def _ways_of_activations(job: JobConfig, tokens: int) -> list[LearnerSettings]:
    """Return the settings of activations that a job allows, fastest first."""
    recompute, offload = job.learner.gradient_checkpointing, job.learner.offload_activations
    return [
        LearnerSettings(tokens, recomputes, offloads)
        for recomputes, offloads in ((False, False), (True, False), (True, True))
        if recompute in ("auto", recomputes) and offload in ("auto", offloads)
    ]


def _terms(job: JobConfig, models: JobModels, settings: LearnerSettings) -> list[memory.Term]:
    return memory.learner_terms(find_learner_load(job, models, settings))


def find_learner_load(
    job: JobConfig, models: JobModels, settings: LearnerSettings
) -> memory.LearnerLoad:
    """Return the memory load of a learner with these settings."""
    return memory.learner_load(
        job,
        models.policy,
        microbatch_tokens=settings.microbatch_tokens,
        checkpointing=settings.gradient_checkpointing,
        offload_activations=settings.offload_activations,
        updated=models.updated,
        frozen=models.frozen,
        roles=models.roles,
        adapter=models.adapter,
    )


def choose_engine_settings(
    job: JobConfig, models: JobModels, card: GpuCard, *, serves: bool = False
) -> EngineSettings:
    """Return the settings of an engine on cards of this kind; keys set by the user are used.

    As many concurrent requests as the KV cache holds at half of their length, but not more than the
    job's episodes. `serves`: requests come from clients, in any number.
    """
    generator = job.generator
    is_vllm = generator.engine == "vllm"
    is_large = card.memory_bytes >= _LARGE_CARD and not card.name.startswith("A100")
    share = generator.memory_share or (memory.VLLM_SHARE if is_vllm else None)
    most = _LARGE_REQUESTS if is_large and is_vllm else _SMALL_REQUESTS
    if not serves and not job.agent.runs_programs:  # a program may have concurrent calls
        most = min(most, job.episodes_at_once)
    batched = generator.max_batched_tokens or (_LARGE_BATCHED if is_large else _SMALL_BATCHED)
    if generator.max_requests is None:
        most = min(most, batched)  # each has a token of a pass
        load = find_engine_load(job, models, EngineSettings(most, batched, share))
        cache = memory.engine_terms(load, card.memory_bytes)[-1].num_bytes
        # Episodes have on average half of their maximum length.
        longest = load.token_bytes * load.max_context  # 0: unknown shape
        requests = max(1, min(most, 2 * cache // longest)) if longest else most
    else:
        requests = generator.max_requests
    if generator.max_batched_tokens is None:
        batched = max(requests, min(batched, requests * _max_context(job)))
    return EngineSettings(requests, batched, share)


def with_engine_settings(job: JobConfig, card: GpuCard, *, serves: bool = False) -> JobConfig:
    """Return a configuration with the keys that `choose_engine_settings` chooses for a card.

    For an unknown model it is unchanged.
    """
    models = find_models(job)
    if models is None:
        return job
    chosen = choose_engine_settings(job, models, card, serves=serves)
    changes: dict[str, Any] = {
        "max_requests": chosen.max_requests,
        "memory_share": chosen.memory_share,
    }
    if job.generator.engine == "vllm":
        changes["max_batched_tokens"] = chosen.batched_tokens
    return job.model_copy(update={"generator": job.generator.model_copy(update=changes)})


def _max_context(job: JobConfig) -> int:
    return job.generator.max_context or job.rollout.max_tokens


def find_engine_load(
    job: JobConfig, models: JobModels, settings: EngineSettings
) -> memory.EngineLoad:
    """Return the memory load of an engine with these settings."""
    generator = job.generator
    num_bytes = 4 if resolve_dtype(generator.dtype, on_gpu=True) == "float32" else 2
    quantised = "fp8" in (generator.quantization, models.policy.quantization)
    return memory.EngineLoad(
        shape=models.policy,
        is_vllm=generator.engine == "vllm",
        weight_bytes=1 if quantised else num_bytes,
        cache_bytes=1 if generator.kv_cache_dtype == "fp8" else num_bytes,
        cards=generator.tensor_parallel,
        max_context=_max_context(job),
        max_requests=settings.max_requests,
        batched_tokens=settings.batched_tokens,
        compiled=generator.compile,
        kv_cache_bytes=(generator.kv_cache_mb or 0) << 20,
        other_weights=sum(shape.weights for shape in models.roles),
        share=settings.memory_share,
    )


# -- one card for learner and engine ---------------------------------------------------------------


@dataclass(frozen=True)
class HeldBytes:
    """The memory of a job's learner and engine on a card that they share."""

    stored: int
    """What the learner holds from step to step: weights and optimiser."""
    step: int
    """What it holds in a step: activations and logits, too."""
    engine: int
    """What the engine holds but its cache."""


@dataclass(frozen=True)
class GpuUse:
    """How learner and engine share a card."""

    memory_share: float | None
    """Share of the card for the engine; None: without a GPU."""
    sleeps: bool
    """Whether the engine frees it while the learner trains."""


def held_bytes(
    job: JobConfig, models: JobModels, card: GpuCard, learner: LearnerSettings
) -> HeldBytes:
    """Return the memory of learner and engine on a card."""
    terms = _terms(job, models, learner)
    step = sum(term.num_bytes for term in terms)
    if models.policy.is_unknown:
        step += round(_UNKNOWN_PASSES * card.memory_bytes)
    engine = choose_engine_settings(job, models, card)
    *without_cache, _ = memory.engine_terms(
        find_engine_load(job, models, engine), card.memory_bytes
    )
    return HeldBytes(
        memory.stored_bytes(terms), step, sum(term.num_bytes for term in without_cache)
    )


def with_memory_share(job: JobConfig, share: float | None) -> JobConfig:
    """Return a configuration with the generators' share of their card."""
    generator = job.generator.model_copy(update={"memory_share": share})
    return job.model_copy(update={"generator": generator})


def choose_gpu_use(job: JobConfig, held: HeldBytes, card_bytes: int) -> GpuUse:
    """Decide how learner and engine share a card of `card_bytes`.

    They overlap if the engine, with a tenth of the memory for its cache, fits beside the learner's
    memory in a step; else the engine sleeps while the learner trains, and uses the memory that the
    learner does not hold between steps. The learner of an SFT job waits for no episodes, so they
    always overlap. Raises ConfigError if not even that fits.
    """
    generator = job.generator
    usable = card_bytes * (1 - _CONTEXT_SHARE)
    left, beside = usable - held.stored, usable - held.step
    needed = held.engine + _LEAST_CACHE_SHARE * card_bytes
    sleeps = beside < needed if generator.sleep == "auto" else generator.sleep == "always"
    sleeps = sleeps and not job.sft.data
    room = left if sleeps else beside
    if generator.memory_share is not None:
        return GpuUse(generator.memory_share, sleeps)
    if room < needed:
        raise ConfigError(
            f"learner and generator do not fit on one GPU of {card_bytes / memory.GIB:.0f} GiB: "
            f"the learner holds {held.stored / memory.GIB:.1f} from step to step and "
            f"{held.step / memory.GIB:.1f} in a step, the engine {held.engine / memory.GIB:.1f} "
            "without a cache",
            hint="train an adapter (lora.rank), keep the optimiser in the machine's memory "
            "(learner.cpu_offload=true), take a smaller model, or two GPUs"
            + (", or validate afterwards (env.num_val=0)" if job.sft.data else ""),
        )
    share = min(room / card_bytes, _MOST_SHARE)
    return GpuUse(floor(100 * share) / 100, sleeps)
