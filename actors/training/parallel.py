"""The ranks of a learner in the training step: FSDP2 over processes on any machines.

Each rank holds a shard of every weight (`torch.distributed.fsdp.fully_shard`, arXiv 2304.11277) and
computes a part of the batch. A layer's weights are gathered while it computes; gradients are summed
over the ranks, never averaged: losses are divided by counts over the whole batch. With replicas the
ranks form a mesh (HSDP): weights are sharded and gathered within a row, and gradients are summed
within a row, then over the rows. A single rank, the usual case, holds everything, and these
operations do nothing.
"""

# torch and transformers leave some of their methods untyped, and torch its stores out of `__all__`.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false

import asyncio
import copy
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ...schemas.config.sections import LearnerConfig, resolve_dtype
from ...schemas.plan.model_refusals import refuse_dividing
from ...schemas.wire.errors import ConfigError
from ..addresses import interface_of, own_address
from ..policy.devices import TRAINED_WEIGHTS, use_onednn
from ..policy.layers import decoder_of, is_recurrent, needs_masks
from ..policy.lora import policy_tensors
from ..policy.policies import prefix_of
from ..weights.broadcast_group import (
    Store,
    no_route,
    open_store,
    reach_store,
)
from ..weights.shared_memory import UnfinishedFile
from ..weights.tensors import DTYPES, CopiedWeights, DigestedCopy, TensorBytes
from .numerics import cast_weights_on_use, is_in_float32, modules_in_float32, store_frozen
from .progress import BACKGROUND, ProcessPhases
from .varlen import AttentionKey, choose_attention, set_attention

# -- attention over sequences whose columns are divided over processes -----------------------------
# As in Ulysses (arXiv 2309.14509), each process has a part of the columns of all heads. An exchange
# before the attention gives each process all columns of a part of the heads, so that any kernel and
# mask can be used; an exchange after the attention restores the parts.

Attention = Callable[..., tuple[Tensor, Any]]
"""transformers' attention interface: (module, query, key, value, mask, **) to [B, T, H, D], …"""


@dataclass(frozen=True)
class SequenceGroup:
    """The processes that divide sequences among them."""

    group: Any
    """Their process group."""
    size: int
    place: int
    """Index of this process, in the order of the columns."""


def _divide_attention(model: nn.Module, share: SequenceGroup) -> None:
    """Make a model accept rows divided over the processes, in addition to full rows.

    Raises ConfigError for a model that cannot be divided.
    """
    check_divisible(model, share.size)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks: Any = ALL_MASK_ATTENTION_FUNCTIONS
    kernels: Any = ALL_ATTENTION_FUNCTIONS

    config = cast(Any, model).config.get_text_config()
    kernel: str = config._attn_implementation
    name = f"divided_{kernel}_over_{share.size}"
    inner = partial(_attend, kernels[kernel], share)
    kernels.register(name, inner)
    if kernel in masks:
        masks.register(name, masks[kernel])
    config._attn_implementation = name


def check_divisible(model: nn.Module, size: int) -> None:
    """Raise ConfigError unless `size` processes can share the columns of a model's rows."""
    config = cast(Any, model).config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)  # also where it has another name
    settings = cast("dict[str, Any]", {"num_attention_heads": heads, **config.to_dict()})
    refuse_dividing(settings, size, is_recurrent=is_recurrent(model))


def _attend(
    inner: Attention,
    share: SequenceGroup,
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Compute attention over full sequences; a wider mask shows that the columns are a part."""
    if query_BHTD.shape[2] == _length(attention_mask, options, query_BHTD.shape[2]):
        return inner(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **options)
    heads = (_exchanged(states, share) for states in (query_BHTD, key_BHTD, value_BHTD))
    if (sinks_H := options.get("s_aux")) is not None:
        options["s_aux"] = sinks_H.chunk(share.size)[share.place]
    states_BTHD, weights = inner(module, *heads, attention_mask, **options)
    return _exchanged(states_BTHD, share), weights


def _length(mask: Tensor | None, options: dict[str, Any], own: int) -> int:
    if mask is not None:
        return mask.shape[-1]
    return options.get("num_columns") or own


class _Exchange(torch.autograd.Function):
    """Send the part at index p of [P, …] to process p."""

    @staticmethod
    def forward(ctx: Any, parts_P: Tensor, group: Any) -> Tensor:
        ctx.group = group
        given_P = parts_P.contiguous()
        taken_P = torch.empty_like(given_P)
        dist.all_to_all_single(taken_P, given_P, group=group)
        return taken_P

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _Exchange.apply(grad_outputs[0], ctx.group), None


def _exchanged(states: Tensor, share: SequenceGroup) -> Tensor:
    """Divide dimension 1 over the processes, and concatenate received parts in dimension 2.

    [B, H, T / P, D] becomes [B, H / P, T, D], and [B, T, H / P, D] becomes [B, T / P, H, D].
    """
    parts_P = torch.stack(list(states.chunk(share.size, dim=1)))
    taken_P = cast(Tensor, _Exchange.apply(parts_P, share.group))
    return torch.cat(list(taken_P.unbind(0)), dim=2)


# -- the repeated layers of a model ----------------------------------------------------------------
# Ranks gather them, and torch.compile compiles them, one at a time. All layers of a kind share the
# compiled code. Rows and columns are dynamic, so that micro-batches of other sizes are not compiled
# again. Hooks of FSDP2 and the recomputation of activations are outside of the compiled code.

_MAX_VARIANTS = 64
"""Variants of one layer's code (gradients, masks, dropout); more raise an error in torch."""


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers marks as not to be split, in order."""
    kinds: set[str] = set(cast(Any, model)._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def compile_layers(model: nn.Module) -> None:
    """Compile the decoder's layers at their first use, each as a full graph.

    Raises ConfigError if torch cannot compile at all.
    """
    _require_compiler()
    torch.compiler.config.recompile_limit = _MAX_VARIANTS
    decoder: nn.Module = decoder_of(model)
    inside = {id(module) for module in decoder.modules()}
    for layer in repeated_layers(model):
        if id(layer) in inside:
            layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True)


def _require_compiler() -> None:
    """Compile something small on the models' device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"learner.compile=true, and torch cannot compile on this machine: {reason}",
            hint="install a C++ compiler (Debian: g++) and Python's headers (python3-dev), or "
            "remove learner.compile",
        ) from error


T = TypeVar("T")
COLLECTIVE_DEADLINE_S = 600.0
"""A rank that others await for longer than this has failed, and with it the learner."""
_BACKGROUND_DEADLINE_S = 3600.0
"""Deadline in the background group, where ranks may wait for a slow disk; a dead rank is noticed by
its connection."""
LOOPBACK_ADDRESS = "127.0.0.1"


class Inside(nn.Module):
    """Wraps a placed model; computations inside it have the full weights.

    As the module around the model, it is where FSDP2 gathers weights outside of layers.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Wrap a model that computes on `device` (default: where its weights are) in `dtype`."""
        super().__init__()
        self.model = model
        self.device = next(model.parameters()).device if device is None else device
        self.dtype = dtype

    def forward(self, work: Callable[[], T]) -> T:
        """Run a computation; its tensors may have gradients."""
        return work()

    def compute(self, work: Callable[[], T]) -> T:
        """Run a computation; free the gathered weights if no backward pass will."""
        result = self(work)
        if isinstance(self, FSDPModule) and not torch.is_grad_enabled():
            self.reshard()
        return result


@dataclass(frozen=True)
class Meeting:
    """The meeting point of a learner's ranks before they connect to each other."""

    store: Store
    """A TCPStore at rank 0."""
    address: str
    """Address of the store."""
    own_address: str
    """Address on which this rank listens for the others."""
    name: str
    """Secret name of this meeting in the store."""
    apart: bool
    """Whether each rank has its own GPUs, instead of one of those visible to all ranks."""

    @classmethod
    def open(cls, address: str = LOOPBACK_ADDRESS, *, apart: bool = False) -> "Meeting":
        """Open the meeting as rank 0 at an address of this machine, by default a local one."""
        return cls(open_store(address), address, address, secrets.token_hex(16), apart)

    def to_map(self) -> dict[str, Any]:
        """Return the information for other ranks, as JSON values."""
        place = {"address": self.address, "port": self.store.port}
        return {**place, "name": self.name, "apart": self.apart}

    @classmethod
    def reach(cls, invitation: Mapping[str, Any]) -> "Meeting":
        """Join a meeting opened by another rank; ProcessGroupFailed if it cannot be reached."""
        address, port = invitation["address"], invitation["port"]
        store = reach_store(address, port)
        return cls(
            store, address, own_address(address, port), invitation["name"], invitation["apart"]
        )


class Parallel:
    """One of the ranks that train together."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        mesh: DeviceMesh | None = None,
        sequence: SequenceGroup | None = None,
        background: dist.ProcessGroup | None = None,
        progress: ProcessPhases | None = None,
    ) -> None:
        """A rank that computes on `device` (default: where the model is), of a mesh if sharded.

        `sequence`: the ranks that share each sequence. `background`: a second group of all ranks,
        for collectives of another thread. `progress` reports the phases of this process.
        """
        self.rank = rank
        self.size = size
        self.group: dist.ProcessGroup | None = None
        """The group of its collectives; None: the default group, in which the ranks train."""
        self._device = device
        self._mesh = mesh
        self.sequence = sequence
        self._background = background
        self._progress = progress or ProcessPhases()
        self.phases = self._progress.training

    @classmethod
    def alone(cls) -> "Parallel":
        """Return the only rank, which holds everything, on the GPU if there is one."""
        return cls(device=torch.device("cuda") if torch.cuda.is_available() else None)

    @classmethod
    def join(
        cls,
        rank: int,
        config: LearnerConfig,
        meeting: "Meeting",
        progress: ProcessPhases | None = None,
    ) -> "Parallel":
        """Connect to the other ranks; call `leave` at the end.

        Raises ConfigError for hardware that this machine does not have.
        """
        place, beside = (0, 1) if meeting.apart else (rank, config.ranks)
        device = device_of(place, beside, config, torch.cuda.device_count())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(meeting.own_address)
        # Groups meet at this store, also later ones; torch sets a timeout of stores that it makes.
        meeting.store.set_timeout(timedelta(seconds=COLLECTIVE_DEADLINE_S))
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore(meeting.name, meeting.store),
                rank=rank,
                world_size=config.ranks,
                timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
            )
            # NCCL connects at the first collective only: this one detects a machine without a
            # route.
            dist.all_reduce(torch.zeros(1, device=device))
        except RuntimeError as error:  # torch.distributed raises nothing more specific
            raise no_route(f"rank {rank} of the learner", meeting.own_address, error) from error
        mesh, sequence = _mesh_of(device, config), _sequence_of(rank, config.context_parallel)
        deadline = timedelta(seconds=_BACKGROUND_DEADLINE_S)
        background = cast(
            dist.ProcessGroup,
            dist.new_group(backend="gloo", timeout=deadline, group_desc=BACKGROUND),
        )
        return cls(rank, config.ranks, device, mesh, sequence, background, progress)

    @property
    def in_background(self) -> "Parallel":
        """The same rank in the second group, whose collectives may run beside those of a step."""
        beside = copy.copy(self)
        beside.group, beside.phases = self._background, self._progress.saving
        return beside

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        if self._mesh is not None:
            dist.destroy_process_group()

    @property
    def sharded(self) -> bool:
        """Whether the weights are sharded."""
        return self._mesh is not None

    @property
    def num_shares(self) -> int:
        """Number of parts into which the sequences of a batch are divided."""
        return self.size if self.sequence is None else self.size // self.sequence.size

    @property
    def share(self) -> int:
        """Index of the part that this rank computes, alone or with its neighbours."""
        return self.rank if self.sequence is None else self.rank // self.sequence.size

    @property
    def filled_by_another(self) -> bool:
        """Whether only rank 0 reads weights, and this rank receives its parts from rank 0."""
        return self.rank > 0

    def place(
        self,
        model: nn.Module,
        config: LearnerConfig,
        attention: AttentionKey = "auto",
        in_float32: Sequence[nn.Module] = (),
        *,
        moves_frozen: bool = False,
    ) -> Inside:
        """Place a model on its device, sharded if configured; called on all ranks together.

        Its weights are those of rank 0. Modules `in_float32` compute with float32 weights in any
        dtype of the model. Weights without a gradient are stored in the compute dtype, unless
        `moves_frozen`: something other than an optimiser changes them. Raises ConfigError for an
        attention that cannot compute the model.
        """
        device = self._device or next(model.parameters()).device
        dtype = DTYPES[resolve_dtype(config.dtype, on_gpu=device.type == "cuda")]
        text_config = cast(Any, model).config.get_text_config()
        chosen = choose_attention(attention, text_config, device, dtype, needs_masks(model))
        if config.compile and chosen == "varlen" and device.type == "cpu":
            raise ConfigError(
                "learner.compile=true, and model.attn_implementation=varlen cannot be compiled on "
                "a CPU, where it computes one sequence after the other",
                hint="set model.attn_implementation=sdpa, or auto",
            )
        set_attention(model, chosen, device)
        in_float32_here = [*in_float32, *modules_in_float32(model)]
        if not moves_frozen:
            store_frozen(model, dtype, in_float32_here)
        if self._device is not None and not self.sharded:
            model.to(self._device)
        if not config.compile:  # it generates its own kernels
            use_onednn(model, TRAINED_WEIGHTS)
        inside = Inside(model, device, dtype)
        if self._mesh is None:
            if dtype != torch.float32:
                cast_weights_on_use(model, repeated_layers(model), dtype, in_float32_here)
            return inside
        if self.sequence is not None:
            _divide_attention(model, self.sequence)
        values = [] if self.rank else [tensor.detach() for tensor in _tensors(inside)]
        gathered_dtype = None if dtype == torch.float32 else dtype
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(gathered_dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        }
        for layer in repeated_layers(model):
            fully_shard(layer, **options)
        for layer in in_float32:
            exact: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
            fully_shard(layer, **options | exact)
        fully_shard(inside, **options)
        for module in inside.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if self.size > 1:
            self._hand_out(inside, values)
        return inside

    @torch.no_grad()
    def _hand_out(self, inside: Inside, values: list[Tensor]) -> None:
        """Send all ranks their parts of rank 0's full tensors, one tensor after the other."""
        for place, tensor in enumerate(_tensors(inside)):
            value = values[place] if values else torch.empty(tensor.shape, dtype=tensor.dtype)
            value = value.to(self._device)
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements).to_local()
                tensor = tensor.to_local()
            else:
                dist.broadcast(value, 0)
            tensor.copy_(value)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def add_up(self, values: Tensor) -> Tensor:
        """Return the sums over all ranks."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather_whole(self, tensor: Tensor) -> Tensor | None:
        """Return the full tensor on the CPU of rank 0; None on other ranks.

        Called on all ranks together. Unlike `whole` it needs no memory on GPUs or other ranks.
        """
        if not isinstance(tensor, DTensor):
            return tensor if self.rank == 0 else None
        if not tensor.placements[-1].is_shard(0):
            raise ValueError(f"FSDP2 divides rows, and this tensor is {tensor.placements}")
        mesh: Tensor = tensor.device_mesh.mesh
        holders: list[int] = mesh.reshape(-1, mesh.shape[-1])[0].tolist()
        local = tensor.to_local()
        if self.rank != 0:
            if self.rank in holders and local.numel():
                dist.send(local.contiguous(), 0, group=self.group)
            return None
        gathered = torch.empty(tensor.shape, dtype=tensor.dtype)
        num_rows = -(-len(gathered) // len(holders))  # of each but the last, as torch.chunk divides
        for place, holder in enumerate(holders):
            part = gathered[place * num_rows : (place + 1) * num_rows]
            if holder == 0:
                part.copy_(local)
            elif part.numel():
                dist.recv(part, holder, group=self.group)
        return gathered


def _mesh_of(device: torch.device, config: LearnerConfig) -> DeviceMesh:
    """Return the mesh of all ranks: a row of neighbours holds one copy of the model."""
    if config.replicas == 1:
        return init_device_mesh(device.type, (config.ranks,))
    return init_device_mesh(
        device.type,
        (config.replicas, config.ranks // config.replicas),
        mesh_dim_names=("replicate", "shard"),
    )


def _sequence_of(rank: int, size: int) -> SequenceGroup | None:
    """Return the neighbours of a rank that share its sequences."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size)
    return SequenceGroup(group, size, rank % size)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def device_of(place: int, num_ranks: int, config: LearnerConfig, num_gpus: int) -> torch.device:
    """Return the device of rank `place`, if all ranks see the same GPUs.

    Raises ConfigError for an impossible division of the GPUs.
    """
    if not num_gpus:
        if config.cpu_offload:
            raise ConfigError(
                "learner.cpu_offload=true and this learner has no GPU: everything is in the "
                "machine's memory already",
                hint="remove learner.cpu_offload, or place the run on a node with GPUs",
            )
        return torch.device("cpu")
    if num_gpus < num_ranks:
        raise ConfigError(
            f"learner.ranks={config.ranks} and this learner has {num_gpus} GPUs",
            hint=f"set learner.slots={config.ranks} on a node of GPUs, or lower learner.ranks",
        )
    return torch.device("cuda", place)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank; called on all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, sharded like another tensor.

    Called on all ranks together. Sharded tensors and counts are returned unchanged.
    """
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor) or not tensor.ndim:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


@torch.no_grad()
def whole_tensors(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that change between versions (tied ones once), gathered one at a time.

    With `dtype`, in the published dtype. Called on all ranks together.
    """
    for name, tensor in _changing(model):
        kept_dtype = tensor.dtype if dtype is None else _published_as(model, name, tensor, dtype)
        yield name, whole(tensor.detach().to(kept_dtype))


def _changing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that change between versions; tied tensors once."""
    seen: set[int] = set()
    for name, tensor in policy_tensors(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _published_as(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a published tensor, which is the engine's dtype for it."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if is_in_float32(model, name) else dtype


def snapshot(
    models: Mapping[str, nn.Module], dtype: torch.dtype, draft: UnfinishedFile | None = None
) -> CopiedWeights:
    """Copy each policy's tensors that change between versions; tied tensors once.

    Copies into `draft`, or else into one buffer, pinned and digested for models on a GPU; neither
    is changed afterwards.
    """
    weights = (weight for model in models.values() for weight in model.parameters())
    gpu = next((weight.device for weight in weights if weight.is_cuda), None)
    size = 0 if draft is not None else snapshot_bytes(models, dtype)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=gpu is not None)
    copy = DigestedCopy(buffer, gpu) if gpu is not None else None
    places: list[tuple[str, str, tuple[int, ...], slice]] = []
    start = 0
    for policy, model in models.items():
        for name, tensor in whole_tensors(model, dtype):
            raw = tensor.contiguous().flatten().view(torch.uint8)
            place = slice(start, start + raw.numel())
            if draft is not None:
                draft.write([memoryview(cast(Any, raw.cpu().numpy()))])
            elif copy is not None:
                copy.add(raw)
            else:
                buffer[place].copy_(raw)
            kind = str(tensor.dtype).removeprefix("torch.")
            places.append((f"{prefix_of(policy)}{name}", kind, tuple(tensor.shape), place))
            start = place.stop
    whole_buffer = memoryview(cast(Any, buffer.numpy())) if draft is None else draft.finished()
    view = whole_buffer.toreadonly()
    copied = CopiedWeights(
        {name: TensorBytes(kind, shape, view[place]) for name, kind, shape, place in places}
    )
    if copy is not None:
        copied.fingerprint = copy.finish()
    return copied


def snapshot_bytes(models: Mapping[str, nn.Module], dtype: torch.dtype) -> int:
    """Return the bytes of the tensors that change between versions, of all policies."""
    num_bytes = 0
    for model in models.values():
        for name, tensor in _changing(model):
            num_bytes += tensor.numel() * _published_as(model, name, tensor, dtype).itemsize
    return num_bytes


def torch_thread(num_threads: int) -> ThreadPoolExecutor:
    """Return an executor of one new thread, in which torch uses `num_threads` CPU threads.

    The division of sums between CPU threads affects their last bits, and torch keeps the number of
    CPU threads for each computing thread: a thread that computed before a change keeps the old
    number. So computations with reproducible bits have their own thread, which sets the number
    first.
    """
    torch.set_num_threads(num_threads)
    return ThreadPoolExecutor(
        1, thread_name_prefix="torch", initializer=torch.set_num_threads, initargs=(num_threads,)
    )


async def once_in_torch(num_threads: int, work: Callable[[], T]) -> T:
    """Run `work` with `num_threads` CPU threads, in a thread that ends with it.

    A thread that has computed keeps OpenMP's workers until it ends. If there are more workers than
    cores, they sleep at each barrier instead of spinning: two threads are then hardly faster than
    one.
    """
    thread = torch_thread(num_threads)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)  # a cancelled caller does not wait for a model to load


def check_num_threads(num_threads: int) -> None:
    """Raise ConfigError if the calling thread computes with another number of CPU threads.

    A limit of the environment (OMP_THREAD_LIMIT) overrides the setting.
    """
    threads = torch.get_num_threads()
    if threads != num_threads:
        raise ConfigError(
            f"torch computes with {threads} CPU threads here, and learner.threads is "
            f"{num_threads}: sums would be split otherwise, and their last bits differ",
            hint="unset OMP_THREAD_LIMIT and OMP_DYNAMIC",
        )
