"""Low-rank adapters (LoRA, arXiv 2106.09685) on a transformers model, by PEFT.

A model with an adapter computes with both: its base stays as it was loaded, and only the adapter's
tensors change from version to version, go over the wire, and into checkpoints. Those are PEFT
folders, and the tensors have the names that they have there. Names of tensors follow PEFT:
`base_model.model.<layer>.lora_A.weight`.
"""

# torch, transformers and peft leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...schemas.config.lora import ADAPTER_CONFIG, LoraConfig
from ...schemas.wire.errors import ModelError
from ..storage.models_by_url import base_here

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"
BESIDE = (".base_layer.weight", ".embed_tokens.weight")
"""What PEFT may add to an adapter of the output layer: copies of what the base has."""


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter instead of a model."""
    return os.path.isfile(os.path.join(path, ADAPTER_CONFIG))  # noqa: PTH113, PTH118  False for odd paths


def base_of(folder: str | Path) -> str:
    """Return the model that an adapter belongs to; ModelError when the folder does not say.

    One that came by URL may name its base so: that is fetched, too, which may raise StorageError.
    """
    base = _settings(folder).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"{folder} does not say to which model its adapter belongs",
            hint=f"set base_model_name_or_path in its {ADAPTER_CONFIG}",
        )
    return base_here(str(folder), str(base))


def config_of(folder: str | Path) -> LoraConfig:
    """Return the configuration that makes an adapter like that of a folder."""
    settings = _settings(folder)
    try:
        return LoraConfig(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            targets=settings["target_modules"],
            exclude=settings.get("exclude_modules") or [],
        )
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"{folder} holds no LoRA adapter that can be served: {error}",
            hint="merge it into its model (`merge_and_unload`) and serve that",
        ) from error


def read_lora(folder: str | Path) -> "tuple[float, Mapping[str, Tensor]]":
    """Return an adapter's scale, and its tensors on the CPU; ModelError for one of another kind."""
    settings = _settings(folder)
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if settings.get(key):
            raise ModelError(
                f"the adapter in {folder} has {key}, which is not served here",
                hint="merge it into its model (`merge_and_unload`) and serve that",
            )
    try:
        scale = float(settings["lora_alpha"]) / int(settings["r"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{folder} holds no LoRA adapter: its {ADAPTER_CONFIG} has no r or lora_alpha",
            hint="take a LoRA adapter",
        ) from error
    stored = _stored(folder)
    return scale, {name: stored[name] for name in stored if not name.endswith(BESIDE)}


def beside(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return another model with the same weights in memory, to be given an adapter of its own."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def refuse_other_kind(checkpoint: str | Path, config: LoraConfig) -> None:
    """Raise ModelError if a run cannot go on from a checkpoint: one of them has no adapter."""
    if is_adapter(checkpoint) != (config.rank > 0):
        held = "an adapter" if is_adapter(checkpoint) else "all weights"
        raise ModelError(
            f"the checkpoint {checkpoint} holds {held}, and lora.rank is {config.rank}",
            hint="begin a new run with its weights: `tinkermq train CONFIG --from RUN@STEP`",
        )


def add_adapter(
    model: "PreTrainedModel", config: LoraConfig, *, seed: int, folder: str | Path | None = None
) -> None:
    """Give a model an adapter: that of a folder, or a fresh one, which changes nothing yet.

    All other weights are frozen. Raises ModelError for targets that the model does not have, and
    for a folder whose adapter is not of this configuration.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config)
    set_dropout(model, on=False)
    if folder is not None:
        _check_same(folder, config)
        with torch.no_grad():
            for tensor, stored in _matched(model, folder):
                tensor.copy_(stored)


def merge(model: "PreTrainedModel", folder: str | Path) -> "PreTrainedModel":
    """Return a model with an adapter's product added to its weights; any kind that PEFT knows.

    All of its weights can be trained.
    """
    from peft import PeftModel

    try:
        merged = cast(Any, PeftModel.from_pretrained(model, str(folder))).merge_and_unload()
        return merged.requires_grad_(True)  # PEFT has frozen them
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"the adapter in {folder} cannot be put on {base_of(folder)}: {error}",
            hint="`PeftModel.from_pretrained` must be able to open it",
        ) from error


def untie(model: "PreTrainedModel", folder: str | Path) -> None:
    """Give the output layer weights of its own where an adapter that is merged changes them.

    Tied to the embeddings, what is added to the one would be added to the other.
    """
    from torch.nn import Parameter

    shaped = cast("Any", model)
    head = shaped.get_output_embeddings()
    if head is None or head.weight is not shaped.get_input_embeddings().weight:
        return
    name = next(name for name, one in shaped.named_modules() if one is head)
    targets: list[str] = _settings(folder).get("target_modules") or []
    if any(f".{name}".endswith(f".{target}") for target in targets):
        head.weight = Parameter(head.weight.detach().clone())
        shaped.all_tied_weights_keys = {}
        for config in (shaped.config, shaped.config.get_text_config()):
            config.tie_word_embeddings = False


def has_adapter(model: "nn.Module") -> bool:
    """Whether a model has an adapter."""
    return _NAME in (getattr(model, "peft_config", None) or {})


def policy_tensors(model: "nn.Module") -> "dict[str, Tensor]":
    """Return what changes from version to version: the adapter, or all of a model without one."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if not has_adapter(model):
        return tensors
    return {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor
        for name, tensor in tensors.items()
        if ".lora_" in name
    }


def initial_adapter(model: "nn.Module", path: str) -> "list[Tensor]":
    """Return the adapter that a run begins with: the one in `path`, or none at all, which is 0."""
    import torch

    if is_adapter(path):
        return [stored.to(tensor.device) for tensor, stored in _matched(model, path)]
    return [torch.zeros_like(tensor) for tensor in policy_tensors(model).values()]


@contextlib.contextmanager
def other_adapter(model: "nn.Module", tensors: "Sequence[Tensor]") -> Iterator[None]:
    """Let a model have another adapter for a while, in the order of `policy_tensors`."""
    import torch

    mine = list(policy_tensors(model).values())
    kept = [tensor.detach().clone() for tensor in mine]

    @torch.no_grad()
    def put(values: "Sequence[Tensor]") -> None:
        for tensor, value in zip(mine, values, strict=True):
            tensor.copy_(value)  # in place: what FSDP2 gathers is a view of it

    put(tensors)
    try:
        yield
    finally:
        put(kept)


def set_dropout(model: "nn.Module", *, on: bool) -> None:
    """Switch the dropout of adapters, whatever the mode of the model."""
    modules: Iterable[tuple[str, nn.Module]] = cast(Any, model).named_modules()
    for name, module in modules:
        if ".lora_dropout." in name:
            module.train(on)


def _inject(model: "PreTrainedModel", config: LoraConfig) -> None:
    from peft import LoraConfig as PeftLoraConfig

    wanted = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=config.targets,
        exclude_modules=config.exclude or None,
        lora_dropout=config.dropout,
        task_type="CAUSAL_LM",
    )
    try:
        cast(Any, model).add_adapter(wanted, _NAME)
    except ValueError as error:
        raise ModelError(
            f"lora.targets={config.targets} finds no layers to adapt: {error}",
            hint="name linear layers of the model, or set lora.targets=all-linear",
        ) from error
    _refuse_fused(model, config)


def _refuse_fused(model: "PreTrainedModel", config: LoraConfig) -> None:
    """Refuse adapters of tensors that are no layer's own: experts in one tensor, and routers."""
    from peft.tuners.lora.layer import ParamWrapper

    modules = cast("Iterable[tuple[str, nn.Module]]", cast(Any, model).named_modules())
    fused = [name for name, module in modules if isinstance(module, ParamWrapper)]
    if fused:
        raise ModelError(
            f"lora.targets={config.targets} reaches {fused[0]}, which is no linear layer: adapters "
            "of experts and routers are not trained here",
            hint="name layers of the attention: lora.targets=[q_proj, k_proj, v_proj, o_proj]",
        )


def _matched(model: "nn.Module", folder: str | Path) -> "list[tuple[Tensor, Tensor]]":
    """Pair the tensors of the model's adapter with those of a folder; ModelError if they differ."""
    stored = _stored(folder)
    mine = policy_tensors(model)
    wrong = sorted(
        name
        for name in {*stored, *mine}
        if name not in mine or name not in stored or mine[name].shape != stored[name].shape
    )
    if wrong:
        raise ModelError(
            f"the adapter in {folder} has other tensors than the configuration makes, first "
            f"{wrong[0]}",
            hint="set lora.rank, lora.targets and lora.exclude as they were when it was made",
        )
    return [(tensor, stored[name]) for name, tensor in mine.items()]


def _stored(folder: str | Path) -> "Mapping[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  # PathLike of anything

    file = Path(folder) / _WEIGHTS
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the adapter {file} cannot be read: {error}", hint="copy it again"
        ) from error


def _check_same(folder: str | Path, config: LoraConfig) -> None:
    settings = _settings(folder)
    for key, name, value in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if settings.get(key) != value:
            raise ModelError(
                f"the adapter in {folder} has {name} {settings.get(key)}, lora.{name} is {value}",
                hint=f"set lora.{name}={settings.get(key)}, or train all weights: lora.rank=0",
            )
    for key in ("use_dora", "use_rslora"):
        if settings.get(key):
            raise ModelError(
                f"the adapter in {folder} has {key}, which is not trained here",
                hint="merge it into its model first (`merge_and_unload`)",
            )


def _settings(folder: str | Path) -> dict[str, Any]:
    file = Path(folder) / ADAPTER_CONFIG
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="copy the folder again") from error
