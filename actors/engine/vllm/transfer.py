"""New weights in vLLM's worker processes: the transfer engine of each worker.

A worker takes a version from the learner, as a member of its group (NCCL, gloo, or CUDA IPC on one
card), or from a file in memory written by another process of its machine. Both arrive in parts of
64 MiB; each complete tensor is loaded at once, so no second copy of the model is held. vLLM's own
engines wait without a deadline for a dead trainer; so the groups are those of `actors/weights`.
`outcome` reports the result of a round instead of an exception, which would leave vLLM's layers
half replaced; a failed round is finished and repeated.
"""

# Not installed for development; typings/vllm has the used parts.
# pyright: reportMissingModuleSource=false, reportPrivateUsage=false

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.utils import nccl

from ...addresses import own_address
from ...weights import broadcast_group
from ...weights.tensors import PART_BYTES, Assembler, Fingerprint

BACKEND = "tinkermq"
"""Its name in vLLM's factory."""
Outcome = tuple[Literal["", "done", "failed", "damaged"], str]
"""Outcome of the last operation, with the reason; "": in progress."""


@dataclass
class JoinGroup(WeightTransferInitInfo):
    """Connect to the learner's TCPStore, or form a group there."""

    address: str
    port: int
    group: str = ""
    """Name of the group; empty: only connect."""
    rank: int = 0
    """Rank of the first worker."""
    size: int = 0
    route: Literal["cpu", "cuda", "ipc"] = "cpu"


@dataclass
class TakeVersion(WeightTransferUpdateInfo):
    """Receive a version, from the group or from a file."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    """First byte of each tensor in the payload, ascending."""
    num_bytes: int
    digest: str = ""
    """Fingerprint of the payload; empty: already checked."""
    path: str = ""
    """File with the payload; empty: it is sent through the group."""


class MemoryTransferEngine(WeightTransferEngine[JoinGroup, TakeVersion]):
    """Loads new weights into one worker's model."""

    init_info_cls = JoinGroup
    update_info_cls = TakeVersion

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """There is no group yet."""
        super().__init__(config, vllm_config, device, model)
        self.outcome: Outcome = ("done", "")
        self.replaces_all = False
        """Whether the last version replaced every parameter of the model."""
        self._loaded: set[str] | None = set()
        """Parameters loaded since an update began; None: the model does not report them."""
        self._store: broadcast_group.Store | None = None
        self._group: broadcast_group.Group | None = None

    def init_transfer_engine(self, init_info: JoinGroup) -> None:
        """Start connecting or forming a group; `outcome` changes at the end.

        vLLM's steps continue meanwhile.
        """
        self.outcome = ("", "")
        work = self._meet if init_info.group else self._connect

        def run() -> None:
            self.outcome = _outcome_of(lambda: work(init_info))

        threading.Thread(target=run, name="weights group", daemon=True).start()

    def start_weight_update(self) -> None:
        """Prepare layers to be replaced in place once all their weights have arrived."""
        self._loaded, self.replaces_all = set(), False
        if self.device.type == "cpu":
            for layer in self._experts():
                _make_room(layer)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a version; `outcome` reports the result."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: TakeVersion) -> None:
        """Receive a version into the model."""
        self.outcome = _outcome_of(lambda: self._load_version(update_info))

    def finish_weight_update(self) -> None:
        """End the update of all layers, including layers whose weights have not arrived."""
        finalize_layerwise_reload(self.model, self.model_config)
        there = {name for name, _ in self.model.named_parameters()}
        is_loaded = self.outcome[0] == "done" and self._loaded is not None
        self.replaces_all = is_loaded and there <= (self._loaded or set())
        if self.device.type != "cpu":
            return
        for layer in self._experts():
            # On a CPU vLLM 0.32 packs the experts' weights only at their first loading, and would
            # read later weights as packed.
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                # A head tied to the embedding is not loaded. On a CPU vLLM 0.32 multiplies with a
                # packed copy of it, which would not be updated.
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _connect(self, info: JoinGroup) -> None:
        self._store = broadcast_group.reach_store(info.address, info.port, broadcast_group.INSTEAD)

    def _meet(self, info: JoinGroup) -> None:
        self.shutdown()
        if self._store is None:
            raise broadcast_group.ProcessGroupFailed("this worker is not connected to the learner")
        if info.route == "cuda" and nccl._unpinned_env == {}:  # vLLM: pinned for good
            raise broadcast_group.ProcessGroupFailed(
                "vLLM has set NCCL's protocol for batch-invariant results, and this NCCL is too "
                "old to use another one with the learner",
                hint="install NCCL 2.29.7 or newer, or set weights.transport=object",
            )
        with nccl.unpinned_nccl_env():
            self._group = broadcast_group.meet_group(
                info.route,
                self._store,
                info.group,
                info.rank + self.parallel_config.rank,
                info.size,
                self.device,
                own_address(info.address, info.port),
            )

    def _load_version(self, info: TakeVersion) -> str:
        """Load a version while it arrives; return the error, if any."""
        entries = zip(info.names, info.dtype_names, info.shapes, info.offsets, strict=True)
        assembler = Assembler(entries)
        digest = Fingerprint(info.num_bytes) if info.digest else None
        with disable_mtp_completeness_check(), closing(self._parts(info)) as parts:
            for part in parts:
                if digest is not None:
                    digest.update(part)
                self._load(assembler, part)
        if not assembler.is_done:
            self._load(assembler, torch.empty(0, dtype=torch.uint8, device=self.device))
        if digest is None or (computed := digest.hexdigest()) == info.digest:
            return ""
        return f"it has digest {computed}, the manifest says {info.digest}"

    def _load(self, assembler: Assembler, part: Tensor) -> None:
        if tensors := list(assembler.add(part)):
            names: set[str] | None = self.model.load_weights(tensors)
            known = self._loaded is not None and names is not None
            self._loaded = {*(self._loaded or ()), *(names or ())} if known else None

    def _parts(self, info: TakeVersion) -> Generator[Tensor, None, None]:
        if info.path:
            return file_parts(Path(info.path), info.num_bytes, self.device)
        if self._group is None:
            raise broadcast_group.ProcessGroupFailed("this worker is in no group")
        return self._group.stream(info.num_bytes)

    def _experts(self) -> list[Any]:
        return [
            layer
            for layer in self.model.modules()
            if isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
        ]


def file_parts(path: Path, num_bytes: int, device: torch.device) -> Generator[Tensor, None, None]:
    """Yield the last bytes of a file in parts on a device.

    For a GPU they are copied through two pinned buffers: one is filled while the other is sent.
    """
    size = path.stat().st_size
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    whole = mapped[size - num_bytes :]
    parts = (whole[at : at + PART_BYTES] for at in range(0, num_bytes, PART_BYTES))
    return parts if device.type == "cpu" else _through_pinned(parts, device)


def _through_pinned(parts: Iterable[Tensor], device: torch.device) -> Generator[Tensor, None, None]:
    stages = [torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in stages]
    for number, part in enumerate(parts):
        stage, event = stages[number % 2][: part.numel()], copied[number % 2]
        event.synchronize()  # returns at once for an event that was never recorded
        stage.copy_(part)
        there = stage.to(device, non_blocking=True)
        event.record(torch.cuda.current_stream(device))
        yield there


def _outcome_of(work: Callable[[], str | None]) -> Outcome:
    try:
        trouble = work()
    except broadcast_group.ProcessGroupFailed as error:
        return "failed", str(error)
    except Exception as error:  # noqa: BLE001  of any library: reported as the outcome
        return "failed", f"{type(error).__name__}: {error}"
    return ("damaged", trouble) if trouble else ("done", "")


def _make_room(layer: Any) -> None:
    """Give experts padded by packing the shape of the weights to load."""
    size = layer.quant_method.moe.intermediate_size_per_partition
    num, _, hidden = layer.w13_weight.shape
    for weight, shape in (
        (layer.w13_weight, (num, 2 * size, hidden)),
        (layer.w2_weight, (num, hidden, size)),
    ):
        if weight.shape != shape:
            weight.data = weight.new_empty(shape)


WeightTransferEngineFactory.register_engine(BACKEND, MemoryTransferEngine)
