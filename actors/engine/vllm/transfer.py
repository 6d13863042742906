"""New weights in vLLM's worker processes: the transfer engine of each worker.

A worker takes a version from the learner, as a member of its group (NCCL, gloo, or CUDA IPC on one
card), or from a file in memory written by another process of its machine. Both arrive in parts of
64 MiB; each complete tensor is loaded at once, so no second copy of the model is held. vLLM's own
engines wait without a deadline for a dead trainer; so the groups are those of `actors/weights`.
`outcome` reports the result of a round instead of an exception, which would leave vLLM's layers
half replaced; a failed round is finished and repeated.

vLLM's models read checkpoints, whose tensors have other names and shapes than those of
transformers' classes; they ignore some names that they do not know, and some report parameters as
loaded that are not. So tensors are renamed (`CheckpointForm`), and a version is complete only if
each of its tensors was used and each parameter of vLLM's model was loaded.
"""

# Not installed for development; typings/vllm has the used parts.
# pyright: reportMissingModuleSource=false, reportPrivateUsage=false

import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.utils import nccl

from ...addresses import own_address
from ...weights import broadcast_group
from ...weights.tensors import PART_BYTES, Assembler, Fingerprint, name_some
from .weight_files import hollow_model

BACKEND = "tinkermq"
"""Its name in vLLM's factory."""
Outcome = tuple[Literal["", "done", "failed", "damaged", "mismatch"], str]
"""Outcome of the last operation, with the reason; "": in progress. mismatch: the tensors are not
those of vLLM's model, which has only some of them now."""


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
        self._used: set[str] = set()
        """Tensors of which vLLM has loaded an earlier version."""
        self._form: CheckpointForm | None = None
        self._in_place = set[int]()
        """Ids of the layers that keep their tensors during an update."""
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
        in_place = [layer for layer in self.model.modules() if _is_loaded_in_place(layer)]
        for layer in in_place:
            get_layerwise_info(layer).load_numel_total = 0  # vLLM leaves out those it has begun
        initialize_layerwise_reload(self.model)
        for layer in in_place:
            get_layerwise_info(layer).reset()
        self._in_place = {id(layer) for layer in in_place}

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
        missing = self._not_loaded()
        finalize_layerwise_reload(self.model, self.model_config)
        if missing and self.outcome[0] == "done":
            self.outcome = "mismatch", f"nothing was loaded into {name_some(missing)}"
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
        """Load the tensors that a part completes: new ones one by one, to see if vLLM uses them."""
        again: dict[str, Tensor] = {}
        for name, tensor in assembler.add(part):
            if name in self._used:
                again[name] = tensor
                continue
            try:
                is_used = self._load_tensors({name: tensor})
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise _Mismatch(f"{name}: {type(error).__name__}: {error}") from error
            if not is_used:
                raise _Mismatch(f"it has no parameter for {name}")
            self._used.add(name)
        if again:
            self._load_tensors(again)

    def _load_tensors(self, tensors: dict[str, Tensor]) -> bool:
        """Load tensors; return False if vLLM reports that it loaded nothing."""
        if self._form is None:
            self._form = CheckpointForm(self.model_config)
        names: set[str] | None = self.model.load_weights(iter(self._form.of(tensors)))
        known = self._loaded is not None and names is not None
        self._loaded = {*(self._loaded or ()), *(names or ())} if known else None
        return names is None or len(names) > 0

    def _not_loaded(self) -> list[str]:
        """Return the parameters into which nothing was loaded, before the update is finished.

        A parameter waits on the meta device until its layer is complete, and the calls of its
        loader are listed there; for one that is loaded in place vLLM's report counts.
        """
        if self.model_config.quantization is not None:
            return []  # vLLM computes some parameters from others
        reported = {
            id(parameter)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if not parameter.is_meta
            and (self._loaded is None or name.replace(".base_layer.", ".") in self._loaded)
        }
        arrived, names = set[int](), dict[int, str]()
        for prefix, layer in self.model.named_modules():
            if is_deferred_attention_layer(layer):
                continue  # it has scales of the cache at most
            info = get_layerwise_info(layer)
            is_complete = not info.can_load() and id(layer) not in self._in_place
            called = {name for name, _ in info.loaded_weights}
            kernel = info.kernel_tensors[0] if info.kernel_tensors else {}
            for name, parameter in layer.named_parameters(recurse=False):
                key = id(kernel.get(name, parameter))  # a tied one belongs to several layers
                names.setdefault(key, f"{prefix}.{name}")
                if is_complete or name in called or id(parameter) in reported:
                    arrived.add(key)
        return [name for key, name in names.items() if key not in arrived]

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


class _Mismatch(Exception):
    """A tensor of a version is not one of vLLM's model."""


def _outcome_of(work: Callable[[], str | None]) -> Outcome:
    try:
        trouble = work()
    except _Mismatch as error:
        return "mismatch", str(error)
    except broadcast_group.ProcessGroupFailed as error:
        return "failed", str(error)
    except Exception as error:  # noqa: BLE001  of any library: reported as the outcome
        return "failed", f"{type(error).__name__}: {error}"
    return ("damaged", trouble) if trouble else ("done", "")


# -- names and shapes that vLLM's models read ------------------------------------------------------

_STACKED = re.compile(r"(.*\.mlp\.experts\.)((?:gate_up|down)_proj(?:_bias)?)")


class CheckpointForm:
    """The form of a model's tensors in its checkpoints; a learner has those of transformers' class.

    They differ in experts (a tensor for each), convolutions (one for queries, keys and values
    each), and names. transformers converts them when it writes a checkpoint.
    """

    def __init__(self, model_config: Any) -> None:
        """Read the conversions of the class of vLLM's `model_config`."""
        trusted = bool(model_config.trust_remote_code)
        self._hollow: Any = hollow_model(model_config.model, trust_remote_code=trusted)
        conversions = get_model_conversion_mapping(self._hollow, add_legacy=False)
        self._conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
        self._hollow._weight_conversions = self._conversions
        self._splits_experts = model_config.hf_text_config.model_type == "gpt_oss"

    def of(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint that has these."""
        if self._conversions:
            revert: Any = revert_weight_conversion
            tensors = revert(self._hollow, tensors)
        for name, tensor in tensors.items():
            stacked = _STACKED.fullmatch(name) if self._splits_experts else None
            if stacked is None:
                yield name, tensor
                continue
            # vLLM 0.32 copies stacked experts of gpt-oss into tensors without memory
            for number, expert in enumerate(tensor):
                yield f"{stacked[1]}{number}.{stacked[2]}", expert


def _is_loaded_in_place(layer: nn.Module) -> bool:
    """Return whether vLLM does nothing but copy into a layer's parameters.

    Such a layer keeps its tensors during an update: some of vLLM's models copy into them directly
    (sinks), which vLLM's own update of whole layers does not notice.
    """
    parameters = [*layer.parameters(recurse=False)]
    return (
        bool(parameters)
        and getattr(layer, "quant_method", None) is None
        and not is_deferred_attention_layer(layer)
        and not any(hasattr(each, "weight_loader") for each in parameters)
    )


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
