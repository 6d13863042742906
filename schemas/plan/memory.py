"""Memory of a learner's rank and of a generator's engine on a card.

Each term is the memory of one kind of tensor at the peak: at the end of a forward pass, with the
gradients of earlier micro-batches. Activations are counted tensor by tensor, as autograd keeps them
in a decoder layer of transformers; `tests/actors/learner/test_memory_estimates.py` compares the
sums with what torch allocates.

Letters: D hidden size, A width of the query heads, K width of the key heads, I width of the MLP,
V vocabulary, c bytes of the compute dtype.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..config.job import JobConfig
from ..config.sections import resolve_dtype
from .model_shape import ModelShape, VisionShape

GIB = 1 << 30
_MIB = 1 << 20
LOGITS_BYTES = {True: GIB, False: 256 * _MIB}
"""Float32 logits that the learner holds at once: on a GPU, and on a CPU. On a GPU the gradient of
the output layer is accumulated once per chunk of logits, so fewer chunks are better."""
_LOGITS_COPIES = 3
"""Tensors of that size: logits, log-softmax, and a temporary one for an entropy or gradient. In
float32 on a CPU there are two: the third is for the weight's gradient, which is added in place
there."""
_ADAMW_BYTES = 8
"""Two moments in float32."""
_MUON_BYTES = 4
_MASTER_BYTES = 4
_INPUTS_ON_CARD = 2
_PREFIX_CACHE_BYTES = GIB
_CONTEXT_BYTES = GIB
"""CUDA's context, cuBLAS's workspaces and loaded kernels of a process."""
_NCCL_BYTES = GIB // 2
_UNUSABLE = 0.04
"""Share of a card lost to the allocator's fragmentation."""
_GRAPHS_BYTES = GIB
VLLM_SHARE = 0.92
"""vLLM's share of a card that it does not share."""
VERSIONS_IN_MEMORY = 3
"""Versions of new weights that a sender holds: the newest two, and the one being published."""
TRANSFER_BYTES = 2 * 64 * _MIB
"""Two buckets of weights in transfer."""


@dataclass(frozen=True)
class Term:
    """The memory of one kind of tensor on a card."""

    name: str
    num_bytes: int
    remedy: str = ""
    """The keys that shrink it."""


@dataclass(frozen=True)
class LearnerLoad:
    """Inputs of the memory estimate of a learner's rank."""

    shape: ModelShape
    microbatch_tokens: int
    row_tokens: int
    checkpointing: bool
    lora_rank: int = 0
    lora_weights: int = 0
    """Weights of the adapter; 0: all weights are trained."""
    compute_bytes: int = 4
    """Of the compute dtype: 4 or 2."""
    optimizer: str = "adamw"
    ranks: int = 1
    shards: int = 1
    """Ranks over which a copy of the model is divided."""
    context_parallel: int = 1
    offload_activations: bool = False
    """Whether the inputs of recomputed layers lie in the machine's memory."""
    offload: bool = False
    """Whether weights, gradients and optimiser state lie in the machine's memory."""
    dense_mask: bool = True
    """Whether attention reads a mask of rows and repeated keys, as SDPA does, not lengths."""
    on_gpu: bool = True
    updated: tuple[ModelShape, ...] = ()
    """The critic and the policies of other roles, which have an optimiser, too."""
    frozen: tuple[ModelShape, ...] = ()
    """The reference and teachers that the learner loads."""
    image_tokens: int = 0
    """Tokens of a pass that are images, at most."""
    published_bytes: int = 0
    """Bytes of a version of new weights."""

    @property
    def trained(self) -> int:
        """Number of trained weights of the policy."""
        return self.lora_weights or self.shape.weights

    @property
    def is_sharded(self) -> bool:
        """Whether weights are gathered, in the compute dtype, layer by layer."""
        return self.ranks > 1 or self.offload


def learner_load(
    job: JobConfig,
    shape: ModelShape,
    *,
    microbatch_tokens: int,
    checkpointing: bool,
    offload_activations: bool = False,
    on_gpu: bool = True,
    updated: Iterable[ModelShape] = (),
    frozen: Iterable[ModelShape] = (),
    roles: Iterable[ModelShape] = (),
    adapter: int | None = None,
) -> LearnerLoad:
    """Return the load of one rank of a job's learner, from its configuration.

    `roles` are the policies of other roles, which are also `updated`; `adapter` is the number of
    its adapter's weights, if they were counted.
    """
    learner, lora = job.learner, job.lora
    published = [adapter_weights(job, model) or model.weights for model in (shape, *roles)]
    published_width = 4 if job.published_dtype(on_gpu=on_gpu) == "float32" else 2
    dtype = resolve_dtype(learner.dtype, on_gpu=on_gpu)
    attention = job.model.attn_implementation
    reads_lengths = attention == "auto" and on_gpu and dtype == "bfloat16"
    return LearnerLoad(
        shape=shape,
        microbatch_tokens=microbatch_tokens,
        row_tokens=min(learner.max_row_tokens, microbatch_tokens),
        checkpointing=checkpointing,
        lora_rank=lora.rank,
        lora_weights=adapter_weights(job, shape) if adapter is None else adapter,
        compute_bytes=4 if dtype == "float32" else 2,
        optimizer=learner.optimizer,
        ranks=learner.ranks,
        shards=learner.ranks // learner.replicas,
        context_parallel=learner.context_parallel,
        offload_activations=offload_activations,
        offload=learner.cpu_offload,
        dense_mask=attention in ("auto", "sdpa") and not reads_lengths,
        on_gpu=on_gpu,
        updated=tuple(updated),
        frozen=tuple(frozen),
        image_tokens=0 if shape.vision is None else image_tokens(job, microbatch_tokens),
        published_bytes=published_width * sum(published) if job.generator.count else 0,
    )


def image_tokens(job: JobConfig, num_tokens: int) -> int:
    """Return the most image tokens of a pass: all image tokens of first prompts.

    A prompt shared by responses is in each row once.
    """
    rollout, learner = job.rollout, job.learner
    prompt, response = rollout.max_prompt_tokens, rollout.response_limit
    shared = 1
    if learner.share_prompts:
        in_row = (learner.max_row_tokens - prompt) // max(1, response)
        shared = max(1, min(rollout.group_size, in_row))
    return num_tokens * prompt // (prompt + shared * response)


def adapter_weights(job: JobConfig, shape: ModelShape) -> int:
    """Return the number of weights of a job's adapter; 0 without one."""
    lora = job.lora
    if not lora.rank:
        return 0
    chosen = [
        (inputs + outputs) * lora.rank
        for name, inputs, outputs in shape.linear_shapes()
        if (lora.targets == "all-linear" or name in lora.targets) and name not in lora.exclude
    ]
    return shape.layers * sum(chosen)


# -- a learner's rank ------------------------------------------------------------------------------


STORED = ("weights", "optimiser states", "critic and other policies", "reference and teachers")
"""Terms of a learner that persist between steps."""
PASSING = ("activations", "images", "logits")
"""Terms of a learner during a pass."""


def learner_terms(load: LearnerLoad) -> list[Term]:
    """Return the memory of a learner's rank on its card, in bytes."""
    terms = [
        *_stored(load),
        Term("activations", _activations(load), _less_activations(load)),
        Term("images", _images(load), "lower learner.microbatch_tokens"),
        Term("logits", _logits(load), "lower learner.microbatch_tokens"),
    ]
    if load.is_sharded:
        terms.append(Term("gathered weights", _gathered(load), "take a smaller model"))
    elif load.compute_bytes == 2 and not load.lora_weights:
        # Layers keep them for the backward pass; recomputed layers one at a time.
        layer = load.shape.layer_weights
        cast = load.shape.root_weights + layer if load.checkpointing else load.shape.weights
        num_bytes = cast * load.compute_bytes
        terms.append(Term("weights in 16 bits", num_bytes, "raise learner.ranks and learner.slots"))
    if load.on_gpu:
        nccl = _NCCL_BYTES if load.ranks > 1 else 0
        terms.append(Term("CUDA and transfer buffers", _CONTEXT_BYTES + nccl + TRANSFER_BYTES))
    return [term for term in terms if term.num_bytes]


def _stored(load: LearnerLoad) -> list[Term]:
    """Return the terms that persist between steps, and the gradients."""
    shape, share = load.shape, 0 if load.offload else 1
    others = sum(model.weights for model in load.updated)
    updated = load.trained + others
    state = _state_bytes(load)
    # Frozen weights are stored in the compute dtype.
    own = shape.weights * (load.compute_bytes if load.lora_weights else _MASTER_BYTES)
    own += load.lora_weights * _MASTER_BYTES

    def divided(num_bytes: int) -> int:
        return share * num_bytes // load.shards

    by_ranks = "raise learner.ranks and learner.slots"
    fewer = by_ranks if load.lora_weights else f"set lora.rank, or {by_ranks}"
    by_offload = "" if load.optimizer == "muon" else ", or set learner.cpu_offload"
    lighter = ", learner.optimizer=muon" if load.optimizer == "adamw" else ""
    state_fewer = fewer if load.lora_weights else f"set lora.rank{lighter}, or {by_ranks}"
    frozen = sum(model.weights for model in load.frozen)
    return [
        Term("weights", divided(own), f"{by_ranks}{by_offload}"),
        Term("optimiser states", divided(state), f"{state_fewer}{by_offload}"),
        Term("gradients", divided(updated * _MASTER_BYTES) + _head_gradient(load), fewer),
        Term(
            "critic and other policies",
            divided(others * _MASTER_BYTES),
            f"name smaller models for critic.path and policies, or {by_ranks}",
        ),
        Term(
            "reference and teachers",
            divided(frozen * load.compute_bytes),
            "set lora.rank, or algorithm.kl_coef=0, or name smaller teachers",
        ),
    ]


def _state_bytes(load: LearnerLoad) -> int:
    """Return the bytes of all optimiser states, over all ranks of a copy of the model."""
    updated = load.trained + sum(model.weights for model in load.updated)
    if load.optimizer != "muon":
        return updated * _ADAMW_BYTES
    roots = sum(model.root_weights for model in load.updated)
    roots += 0 if load.lora_weights else load.shape.root_weights
    return roots * _ADAMW_BYTES + (updated - roots) * _MUON_BYTES


def host_terms(load: LearnerLoad) -> list[Term]:
    """Return a learner rank's use of host memory besides its own process.

    A checkpoint is written from a copy of all trained tensors; with several ranks, the first
    gathers all weights. It also holds versions of new weights, in pinned memory, of which torch
    takes powers of two.
    """
    weights = _MASTER_BYTES * (load.trained + sum(model.weights for model in load.updated))
    copied = (weights + _state_bytes(load)) // load.shards
    terms = [
        Term("copy for a checkpoint", copied),
        Term("weights for a checkpoint, on the first rank", weights if load.is_sharded else 0),
        Term("activations", _inputs(load) if load.offload_activations else 0),
    ]
    if load.on_gpu and load.published_bytes:
        pinned = 1 << (load.published_bytes - 1).bit_length()
        name = "versions of new weights" + (", on the first rank" if load.ranks > 1 else "")
        terms.append(Term(name, VERSIONS_IN_MEMORY * pinned))
    return [term for term in terms if term.num_bytes]


def _inputs(load: LearnerLoad) -> int:
    """Return the bytes of all layers' inputs, for the tokens of a pass."""
    tokens = -(-load.microbatch_tokens // load.context_parallel)
    return tokens * load.shape.layers * load.compute_bytes * load.shape.hidden


def _head_gradient(load: LearnerLoad) -> int:
    """Return the bytes of the embeddings' gradient in a pass; on a CPU it has only read rows."""
    if _adds_gradients_in_place(load) or load.lora_weights or load.is_sharded:
        return 0
    return load.shape.embedding_weights * _MASTER_BYTES


def _adds_gradients_in_place(load: LearnerLoad) -> bool:
    """Return whether passes add to existing gradients: in float32 on a CPU."""
    return not load.on_gpu and load.compute_bytes == _MASTER_BYTES


def _less_activations(load: LearnerLoad) -> str:
    if not load.checkpointing:
        return "set learner.gradient_checkpointing=true, or lower learner.microbatch_tokens"
    offload = "" if load.offload_activations else "set learner.offload_activations=true, or "
    if load.microbatch_tokens > load.row_tokens:
        return f"{offload}lower learner.microbatch_tokens"
    return (
        f"{offload}lower learner.max_row_tokens with rollout.max_response_tokens, or raise "
        "learner.context_parallel"
    )


def _activations(load: LearnerLoad) -> int:
    """Return the bytes of activations at the peak, and of a recomputed layer beyond the logits."""
    again = _layer(load) - _logits(load) - _head_gradient(load) if load.checkpointing else 0
    return _held(load) + max(0, again)


def _held(load: LearnerLoad) -> int:
    """Return the bytes that autograd keeps of a micro-batch's forward pass."""
    shape, tokens = load.shape, -(-load.microbatch_tokens // load.context_parallel)
    held = _inputs(load) if load.checkpointing else shape.layers * _layer(load)
    if load.offload_activations:  # the computing layer, and the one being copied
        held = min(held, _INPUTS_ON_CARD * _inputs(load) // shape.layers)
    rows = load.microbatch_tokens // max(1, load.row_tokens)
    mask = rows * load.row_tokens**2 * (1 + load.compute_bytes) if load.dense_mask else 0
    return held + tokens * 3 * 4 * shape.hidden + mask


def _layer(load: LearnerLoad) -> int:
    """Return the bytes that autograd keeps of a layer for a micro-batch."""
    return -(-load.microbatch_tokens // load.context_parallel) * layer_bytes_per_token(load)


def _gathered(load: LearnerLoad) -> int:
    """Return the bytes of gathered weights, and of gradients beyond activations and logits.

    A gradient is whole until the ranks add it, in float32: that of the output layer in all layers'
    backward passes, those outside of layers at the end, when no weight is gathered any more.
    """
    shape, c = load.shape, load.compute_bytes
    layer, root, head = shape.layer_weights, shape.root_weights, shape.embedding_weights
    gathered = (root + 2 * layer) * c
    if load.lora_weights:
        return gathered
    held, logits = _held(load), _logits(load)
    rounded = c if c < _MASTER_BYTES else 0
    of_head = logits - logits // _LOGITS_COPIES + head * (_MASTER_BYTES + rounded) - layer * c
    # The last layer's gradient is added while the next one is computed: again, or its rest freed.
    of_layer = (_layer(load) if load.checkpointing else -_layer(load)) + head * c
    of_layer += layer * _MASTER_BYTES
    at_end = root * (_MASTER_BYTES + c) - gathered
    peak = max(held + max(of_head, of_layer), at_end)
    return gathered + max(0, peak - _activations(load) - logits)


def layer_bytes_per_token(load: LearnerLoad) -> int:
    """Return the bytes that autograd keeps of a decoder layer, for one token."""
    shape, c = load.shape, load.compute_bytes
    width, narrow = shape.attention_width, shape.kv_width
    trains_norms = not load.lora_weights
    # Two norms read the residual stream in float32; their weights' gradients also need the
    # normalised values.
    if c == 4:
        stream, normed_head = (24 if trains_norms else 16), (8 if trains_norms else 4)
    else:
        stream, normed_head = (16 if trains_norms else 12), (6 if trains_norms else 4)
    num_bytes = stream * shape.hidden
    if shape.normed_heads:
        num_bytes += normed_head * (width + narrow)
    keys_and_values = 2 * (width if load.dense_mask else narrow)  # SDPA repeats them with a mask
    num_bytes += c * (2 * width + keys_and_values) + 4 * shape.heads
    num_bytes += 4 * c * shape.intermediate
    if shape.experts:
        num_bytes += 3 * c * shape.chosen_experts * shape.hidden + 12 * shape.experts
    if load.lora_weights:
        num_bytes += 2 * c * load.lora_rank * len(shape.linear_shapes()) // 2
    return num_bytes


def _images(load: LearnerLoad) -> int:
    """Return the bytes that autograd keeps of the vision tower for a micro-batch's images."""
    vision, c = load.shape.vision, load.compute_bytes
    if vision is None:
        return 0
    patches = load.image_tokens * vision.merge
    layer = _vision_layer_bytes(vision, c)
    held = vision.layers * (c * vision.hidden if load.checkpointing else layer)
    pixels = vision.pixels * (4 if c == 4 else 4 + c)
    merger = (_norm_bytes(vision, c) + 2 * c) * vision.hidden + c * vision.outputs // vision.merge
    again = 0
    if load.checkpointing:  # its layers are recomputed after those of the decoder
        again = max(0, patches * layer - _activations(load) - _logits(load))
    return patches * (held + pixels + merger) + again


def _norm_bytes(vision: VisionShape, c: int) -> int:
    """Return the bytes per number read by a norm of the tower; RMSNorm uses float32."""
    if vision.gated:
        return 12 if c == 4 else 8
    return 2 * c


def _vision_layer_bytes(vision: VisionShape, c: int) -> int:
    """Return the bytes that autograd keeps of a tower's layer, for one patch."""
    norms = 2 * _norm_bytes(vision, c) * vision.hidden
    attention = 7 * c * vision.hidden
    mlp = (4 if vision.gated else 3) * c * vision.intermediate
    return norms + attention + mlp


def _logits(load: LearnerLoad) -> int:
    """Return the bytes of the output layer's computation; logits are computed in chunks."""
    tokens = -(-load.microbatch_tokens // load.context_parallel)
    whole = 4 * load.shape.vocab * tokens
    held = min(whole, LOGITS_BYTES[load.on_gpu])
    return (_LOGITS_COPIES - _adds_gradients_in_place(load)) * held


# -- a generator's card ----------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineLoad:
    """Inputs of the memory estimate of a generator's card."""

    shape: ModelShape
    is_vllm: bool
    weight_bytes: float
    """Bytes of one weight: 4, 2, or 1 for FP8."""
    cache_bytes: int
    """Bytes of a number in the KV cache."""
    cards: int
    """Over which the model is divided."""
    max_context: int
    max_requests: int
    batched_tokens: int
    """Tokens of one prefill."""
    compiled: bool = False
    kv_cache_bytes: int = 0
    """As configured; 0: what is left."""
    other_weights: int = 0
    """Of the policies of other roles, on the same card."""
    share: float | None = None
    """Of the card; None: all but fragments."""
    draft: ModelShape | None = None
    """The model that proposes tokens."""
    num_proposed: int = 0
    """Tokens proposed per request and step."""

    @property
    def token_bytes(self) -> int:
        """KV cache of one token on one card; cards divide heads, and what is latent has none.

        The transformers engine holds all tokens in layers that see a window, too.
        """
        num_bytes = 0
        for shape in (self.shape, self.draft):
            if shape is not None:
                divided = 1 if shape.cache.is_latent else max(1, min(self.cards, shape.kv_heads))
                num_bytes += shape.cache.token_bytes(self.cache_bytes) // divided
        return num_bytes

    @property
    def state_bytes(self) -> int:
        """Recurrent states of one request on one card."""
        return self.shape.cache.state_bytes(self.cache_bytes) // self.cards

    @property
    def num_snapshots(self) -> int:
        """Prompts or conversations of half the context that `earlier turns` holds."""
        each = self.state_bytes + self.token_bytes * self.max_context // 2
        return _PREFIX_CACHE_BYTES // max(1, each)


def engine_terms(load: EngineLoad, memory_bytes: int) -> list[Term]:
    """Return the memory of an engine on a card of this size, the KV cache last."""
    shape = load.shape
    weights = int((shape.weights + load.other_weights) * load.weight_bytes) // load.cards
    quantise = "raise generator.tensor_parallel and generator.slots"
    widest = 2 * shape.hidden + 3 * shape.intermediate + shape.attention_width + 2 * shape.kv_width
    activations = load.batched_tokens * widest * 2 // load.cards
    images = load.batched_tokens * _widest_vision(shape.vision) * 2
    logits = 3 * 4 * shape.vocab * load.max_requests * (1 + load.num_proposed)
    terms = [
        Term("weights", weights, quantise),
        Term("activations", activations, "lower generator.max_batched_tokens"),
        *([Term("images", images, "lower generator.max_batched_tokens")] if images else []),
        Term("logits", logits, "lower generator.max_requests"),
        Term("CUDA and transfer buffers", _CONTEXT_BYTES + TRANSFER_BYTES),
    ]
    if load.is_vllm:
        terms += [Term("CUDA graphs", _GRAPHS_BYTES, "set generator.compile=false")]
        terms = [term for term in terms if load.compiled or term.name != "CUDA graphs"]
    else:
        terms += [
            Term("weights of the next version", weights, "set generator.engine=vllm"),
            Term("earlier turns", _PREFIX_CACHE_BYTES),
        ]
    if load.state_bytes:
        states = load.state_bytes * load.max_requests
        terms.append(Term("recurrent states", states, "lower generator.max_requests"))
    usable = usable_bytes(memory_bytes, load.share)
    left = max(0, usable - sum(term.num_bytes for term in terms))
    cache = load.kv_cache_bytes or min(
        left, load.token_bytes * load.max_context * load.max_requests
    )
    needed = max(cache, load.token_bytes * load.max_context)  # one request of maximum length
    return [*terms, Term("KV cache", needed, "lower generator.max_context, or rollout's lengths")]


def _widest_vision(vision: VisionShape | None) -> int:
    """Return the numbers held at once by a tower per image token, and its output."""
    if vision is None:
        return 0
    return vision.merge * (2 * vision.hidden + 3 * vision.intermediate) + vision.outputs


def usable_bytes(memory_bytes: int, share: float | None = None) -> int:
    """Return the memory of a card that an actor can use, by default all but fragmentation."""
    return int(memory_bytes * (1 - _UNUSABLE if share is None else share))


def stored_bytes(terms: Iterable[Term]) -> int:
    """Return the bytes of a learner's terms on its card between two steps."""
    return sum(term.num_bytes for term in terms if term.name in STORED)
