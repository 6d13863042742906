"""Low-rank adapters (LoRA, arXiv 2106.09685) on a transformers model, by PEFT.

The base of a model with an adapter stays as it was loaded; only the adapter's tensors change from
version to version, and are published and saved. Checkpoints are PEFT folders, and tensors have
PEFT's names: `base_model.model.<layer>.lora_A.weight`.
"""

# torch, transformers and peft leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import copy
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import ValidationError

from ...schemas.config.sections import ADAPTER_CONFIG, LoraConfig, pattern_of
from ...schemas.wire.errors import ModelError
from ..storage.adapters import adapter_settings, base_of, is_adapter

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of a layer's name in the names of an adapter's tensors."""
_A = (".lora_A.weight", ".lora_embedding_A")
_B = (".lora_B.weight", ".lora_embedding_B")
BESIDE = (".base_layer.weight", ".embed_tokens.weight")
"""Tensors that PEFT may add to an adapter of the output layer: copies of the base's."""

_HONOURED = frozenset(
    {
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
    }
)
"""PEFT's settings that are supported here."""
_WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "peft_type",  # checked apart
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",  # a job has its own
        "fan_in_fan_out",  # PEFT sets it itself, by the kind of each layer
        "init_lora_weights",  # checked apart
        "eva_config",  # how A was drawn
        "megatron_core",  # without megatron_config
        "qalora_group_size",  # without use_qalora
        "runtime_config",
    }
)
"""PEFT's settings that do not change the results of a stored adapter."""
_REFUSED = {
    "bias": "biases of the base are trained with it",
    "modules_to_save": "whole modules of the base are trained with it",
    "trainable_token_indices": "embeddings of the base are trained with it",
    "ensure_weight_tying": "tied embeddings of the base are trained with it",
    "use_dora": "its layers have magnitudes of their own (DoRA)",
    "lora_bias": "its layers have biases of their own",
    "target_parameters": "it changes parameters other than the weights of layers",
    "layer_replication": "it changes which layers the model has",
    "alora_invocation_tokens": "it works after some tokens only (aLoRA)",
    "arrow_config": "it is mixed from others by a router (Arrow)",
    "megatron_config": "its layers are Megatron's",
    "loftq_config": "it belongs to other weights than the base's (LoftQ)",
    "corda_config": "it belongs to other weights than the base's (CorDA)",
    "lora_ga_config": "it belongs to other weights than the base's (LoRA-GA)",
    "use_qalora": "its inputs are pooled (QA-LoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "kasa_config": "its layers have singular values of their own (KaSA)",
    "velora_config": "its activations are compressed (VeLoRA)",
    "monteclora_config": "its weights are drawn anew (MonteCLoRA)",
}
"""PEFT's settings that are not supported, and why."""
_LORA = "LORA"
_SHAPES = (
    "r",
    "rank_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)
"""Settings that select layers and ranks."""
_SHOWN = 24
_TIED = (".trainable_tokens_delta",)
"""Tensors that PEFT adds to the embeddings and the output layer alike."""
_OFF: tuple[Any, ...] = (None, False, "", "none", [], {})
"""Values that switch a setting off."""
_STARTS = frozenset({True, False, "true", "false", "gaussian", "eva", "orthogonal"})
"""Initialisations that do not change the base."""


def config_of(folder: str | Path) -> LoraConfig:
    """Return the configuration of the adapter in a folder.

    If PEFT's file selects layers by an expression or by blocks, the layers of its tensors are
    named. Raises ModelError that names an unsupported setting.
    """
    settings = adapter_settings(folder)
    _refuse_settings(folder, settings)
    targets: Any = settings.get("target_modules")
    exclude: Any = settings.get("exclude_modules") or []
    if _picks_layers(settings):
        targets, exclude = sorted({layer_of(name) for name in _names(folder)}), []
    if settings.get("r") in (0, None):
        raise ModelError(f"{folder} is not a LoRA adapter: it has no r", hint="take a LoRA adapter")
    fields: dict[str, Any] = {
        "rank": settings["r"],
        "alpha": settings.get("lora_alpha"),
        "targets": targets,
        "exclude": exclude,
        "rank_pattern": settings.get("rank_pattern") or {},
        "alpha_pattern": settings.get("alpha_pattern") or {},
        "rslora": settings.get("use_rslora") or False,
    }
    try:
        config = LoraConfig.model_validate(fields)
    except ValidationError as error:
        raise ModelError(
            f"{folder} is not a supported LoRA adapter: {error}",
            hint=f"see r, lora_alpha and target_modules in its {ADAPTER_CONFIG}, or merge it into "
            "its model (`merge_and_unload`)",
        ) from error
    return config


def read_lora(folder: str | Path) -> "tuple[LoraConfig, Mapping[str, Tensor]]":
    """Return an adapter's configuration, and its tensors on the CPU; raises ModelError."""
    config = config_of(folder)
    stored = _stored(folder)
    tensors = {name: stored[name] for name in stored if not name.endswith(BESIDE)}
    for name, tensor in tensors.items():
        if name.endswith(_A) and len(tensor) != (rank := config.rank_of(layer_of(name))):
            raise ModelError(
                f"the adapter in {folder} has rank {len(tensor)} in {layer_of(name)}, its "
                f"{ADAPTER_CONFIG} says {rank} (r, rank_pattern)",
                hint="copy both of its files again",
            )
    return config, tensors


def uniform(tensors: "Mapping[str, Tensor]", config: LoraConfig) -> "dict[str, Tensor]":
    """Return an equivalent adapter with one rank in all layers, and the scale 1.

    The rank is the largest; layers of a smaller one are padded with zeros.
    """
    import torch

    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        missing = config.max_rank - config.rank_of(layer_of(name))
        if name.endswith(_A):
            result[name] = torch.nn.functional.pad(tensor, (0, 0, 0, missing))
        else:
            scaled = (tensor.float() * config.scale_of(layer_of(name))).to(tensor.dtype)
            result[name] = torch.nn.functional.pad(scaled, (0, missing))
    return result


def layer_of(name: str) -> str:
    """Return the layer of an adapter's tensor; ModelError for a tensor of another kind."""
    end = next((end for end in (*_A, *_B) if name.endswith(end)), "")
    if end and name.startswith(PREFIX):
        return name.removeprefix(PREFIX).removesuffix(end)
    raise ModelError(
        f"the adapter does not fit the model: {name} is not a tensor of a LoRA adapter",
        hint="merge it into its model (`merge_and_unload`), and take that",
    )


def layer_names(model: "nn.Module") -> list[str]:
    """Return the names of the layers with an adapter, each once, without those of modules above."""
    parts = [layer_of(name).split(".") for name in policy_tensors(model)]
    return sorted({each[-2] if each[-1].isdecimal() else each[-1] for each in parts})


def layer_settings(folder: str | Path) -> str:
    """Return the layers and ranks in PEFT's file of an adapter, for messages."""
    settings = adapter_settings(folder)
    return ", ".join(
        f"{name}={reprlib.repr(settings[name])}"
        for name in _SHAPES
        if settings.get(name) not in (None, [], {})
    )


def check_base(model: "nn.Module", folder: str | Path) -> None:
    """Raise ModelError for an adapter that contains other embeddings than the model's.

    PEFT writes copies of embeddings to an adapter of them, and may have resized or trained them.
    """
    import torch

    stored = _stored(folder)
    copies = [name for name in stored if name.endswith(BESIDE)]
    modules = dict(cast("Iterable[tuple[str, nn.Module]]", cast(Any, model).named_modules()))
    for name in copies:
        plain = name.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".base_layer")
        mine: Tensor | None = getattr(modules.get(plain), "weight", None)
        theirs = stored[name]
        if mine is None or mine.is_meta:
            continue
        mine = mine.detach().to("cpu", torch.bfloat16)
        theirs = theirs.to(torch.bfloat16)
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=2e-2, atol=1e-4):
            raise ModelError(
                f"the adapter in {folder} contains {plain} {list(theirs.shape)}, which is not the "
                f"{list(mine.shape)} of its base",
                hint="merge it into its model with PEFT (`merge_and_unload`), and take that",
            )


def share_weights(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return another model that shares the weights, for an adapter of its own."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def refuse_other_kind(checkpoint: str | Path, config: LoraConfig) -> None:
    """Raise ModelError if either a run or its checkpoint has an adapter, but not both."""
    if is_adapter(checkpoint) != (config.rank > 0):
        content = "an adapter" if is_adapter(checkpoint) else "all weights"
        raise ModelError(
            f"the checkpoint {checkpoint} contains {content}, but lora.rank is {config.rank}",
            hint="start a new run from its weights: `tinkermq train CONFIG --from RUN@STEP`",
        )


def add_adapter(
    model: "PreTrainedModel", config: LoraConfig, *, seed: int, folder: str | Path | None = None
) -> None:
    """Give a model the adapter of a folder, or a new one, which does not change its results.

    All other weights are frozen. Raises ModelError for targets that the model does not have, and
    for an adapter of another configuration.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config)
    set_dropout(model, on=False)
    if folder is not None:
        _check_same(folder, config, [layer_of(name) for name in policy_tensors(model)])
        check_base(model, folder)
        with torch.no_grad():
            for tensor, stored in _matched(model, folder):
                tensor.copy_(stored)


def refuse_unmatched(model: "nn.Module", config: LoraConfig) -> None:
    """Raise ModelError for a name in an adapter's configuration that matches no layer.

    A misspelt name would leave layers without an adapter, or with another rank, unnoticed.
    """
    adapted = [layer_of(name) for name in policy_tensors(model)]
    modules: Iterable[tuple[str, nn.Module]] = cast(Any, model).named_modules()
    present = [name for name, _ in modules]
    targets = () if isinstance(config.targets, str) else config.targets
    unmatched = [
        *(("targets", name) for name in targets if not _is_named(name, adapted)),
        *(("exclude", name) for name in config.exclude if not _is_named(name, present)),
        *(("rank_pattern", name) for name in config.rank_pattern if not _matches(name, adapted)),
        *(("alpha_pattern", name) for name in config.alpha_pattern if not _matches(name, adapted)),
    ]
    if unmatched:
        key, name = unmatched[0]
        layers = sorted({layer.rpartition(".")[2] for layer in adapted})
        raise ModelError(
            f"lora.{key} has {name!r:.80}, which matches no layer",
            hint=f"correct it, or leave it out; adapted layers are {', '.join(layers[:_SHOWN])}",
        )


def _is_named(name: str, layers: Iterable[str]) -> bool:
    return any(f".{layer}".endswith(f".{name}") for layer in layers)


def _matches(pattern: str, layers: Iterable[str]) -> bool:
    return any(pattern_of([pattern], layer) for layer in layers)


def merge(model: "PreTrainedModel", folder: str | Path) -> "PreTrainedModel":
    """Merge an adapter of any kind that PEFT can merge into a model's weights.

    All weights of the result can be trained. Raises ModelError.
    """
    from peft import PeftModel

    settings = adapter_settings(folder)
    if str(settings.get("peft_type", _LORA)).upper() == _LORA:
        _refuse_unknown(folder, settings)
    try:
        loaded = cast(Any, PeftModel.from_pretrained(model, str(folder)))
        merged = loaded.eval().merge_and_unload()
        return merged.requires_grad_(True)  # PEFT has frozen them
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,  # also NotImplementedError, for a kind that PEFT cannot merge
        TypeError,
        AttributeError,
        ImportError,
    ) as error:
        used = [name for name in settings if settings[name] not in _OFF and name in _REFUSED]
        raise ModelError(
            f"the adapter in {folder} cannot be merged into {base_of(folder)}: {error}"
            + (f" (it has {', '.join(used)})" if used else ""),
            hint="`PeftModel.from_pretrained(…).merge_and_unload()` must be able to do it",
        ) from error


def untie(model: "PreTrainedModel", folder: str | Path) -> None:
    """Untie the output layer from the embeddings if a merged adapter changes one of them.

    Otherwise the adapter's product would be added to both.
    """
    from torch.nn import Parameter

    shaped = cast("Any", model)
    head, embedding = shaped.get_output_embeddings(), shaped.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    if adapter_settings(folder).get("ensure_weight_tying"):
        return
    tied = tuple(
        f"{PREFIX}{name}." for name, module in shaped.named_modules() if module in (head, embedding)
    )
    changed = (name for name in _names(folder) if not name.endswith((*BESIDE, *_TIED)))
    if any(name.startswith(tied) for name in changed):
        head.weight = Parameter(head.weight.detach().clone())
        shaped.all_tied_weights_keys = {}
        for config in (shaped.config, shaped.config.get_text_config()):
            config.tie_word_embeddings = False


def has_adapter(model: "nn.Module") -> bool:
    """Whether a model has an adapter."""
    return _NAME in (getattr(model, "peft_config", None) or {})


def policy_tensors(model: "nn.Module") -> "dict[str, Tensor]":
    """Return the published tensors: the adapter, or all weights of a model without one."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if not has_adapter(model):
        return tensors
    return {
        f"{PREFIX}{name.replace(f'.{_NAME}.', '.').removesuffix(f'.{_NAME}')}": tensor
        for name, tensor in tensors.items()
        if ".lora_" in name
    }


def initial_adapter(model: "nn.Module", path: str) -> "list[Tensor]":
    """Return the adapter that a run starts with: that in `path`, or zeros."""
    import torch

    if is_adapter(path):
        return [stored.to(tensor.device) for tensor, stored in _matched(model, path)]
    return [torch.zeros_like(tensor) for tensor in policy_tensors(model).values()]


@contextlib.contextmanager
def other_adapter(model: "nn.Module", tensors: "Sequence[Tensor]") -> Iterator[None]:
    """Replace a model's adapter within the block, in the order of `policy_tensors`."""
    import torch

    mine = list(policy_tensors(model).values())
    saved = [tensor.detach().clone() for tensor in mine]

    @torch.no_grad()
    def put(values: "Sequence[Tensor]") -> None:
        for tensor, value in zip(mine, values, strict=True):
            tensor.copy_(value)  # in place: FSDP2 gathers views of it

    put(tensors)
    try:
        yield
    finally:
        put(saved)


def set_dropout(model: "nn.Module", *, on: bool) -> None:
    """Switch the dropout of adapters, independently of the model's mode."""
    modules: Iterable[tuple[str, nn.Module]] = cast(Any, model).named_modules()
    for name, module in modules:
        if ".lora_dropout." in name:
            module.train(on)


def _inject(model: "PreTrainedModel", config: LoraConfig) -> None:
    from peft import LoraConfig as PeftLoraConfig
    from transformers.pytorch_utils import Conv1D

    modules: Iterable[nn.Module] = cast(Any, model).modules()
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_targets(model, config),
        exclude_modules=config.exclude or None,
        lora_dropout=config.dropout,
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        use_rslora=config.rslora,
        task_type="CAUSAL_LM",
        # GPT-2's layers have their weights transposed; PEFT warns where it finds out itself
        fan_in_fan_out=any(type(module) is Conv1D for module in modules),
    )
    try:
        cast(Any, model).add_adapter(peft_config, _NAME)
    except ValueError as error:
        raise ModelError(
            f"lora.targets={config.targets} matches no layers: {error}",
            hint="name linear layers of the model, or set lora.targets=all-linear",
        ) from error
    _refuse_fused(model, config)


_EXPERT_LAYERS = frozenset(
    {"gate", "router", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
)
"""Layers that PEFT takes for experts and routers in a model with experts, wherever they are."""
_STATE_SPACE_LAYERS = frozenset({"dt_proj", "out_proj"})
"""Layers of state spaces whose weights kernels read, without an adapter."""


def _targets(model: "nn.Module", config: LoraConfig) -> "Literal['all-linear'] | list[str]":
    """Return the names of the adapted layers: of all linear ones without those of the two sets.

    Nor are those adapted whose output only chooses keys (the index of DeepSeek V3.2), without a
    gradient.
    """
    from torch import nn

    modules = cast("list[tuple[str, nn.Module]]", list(cast(Any, model).named_modules()))
    apart = frozenset(
        name
        for _, module in modules
        if type(module).__name__.endswith(("Indexer", "Router"))
        for name, _ in module.named_children()
    )
    if any(_has_experts(module) for _, module in modules):
        apart |= _EXPERT_LAYERS
    if any(_is_state_space(module) for _, module in modules):
        apart |= _STATE_SPACE_LAYERS
    if config.targets != "all-linear" or not apart:
        return config.targets
    head = cast(Any, model).get_output_embeddings()
    linear = [name for name, each in modules if isinstance(each, nn.Linear) and each is not head]
    return sorted({name.rpartition(".")[2] for name in linear} - apart)


def _has_experts(module: "nn.Module") -> bool:
    """Return whether a module has one tensor for several experts."""
    from torch import nn

    own = module.parameters(recurse=False)
    return not isinstance(module, nn.Conv1d) and any(weight.ndim == 3 for weight in own)


def _is_state_space(module: "nn.Module") -> bool:
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return own >= {"A_log", "D"}


def _refuse_fused(model: "PreTrainedModel", config: LoraConfig) -> None:
    """Raise ModelError for adapters of experts in one tensor, of routers, and of state spaces."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    modules = cast("list[tuple[str, nn.Module]]", list(cast(Any, model).named_modules()))
    fused = [
        name
        for name, module in modules
        if isinstance(module, ParamWrapper)
        or (isinstance(module, LoraLayer) and type(module.base_layer).__name__.endswith("Router"))
    ]
    if fused:
        raise ModelError(
            f"lora.targets={config.targets} matches {fused[0]}, which is not a linear layer: "
            "adapters of experts and routers are not trained here",
            hint="name layers of the attention: lora.targets=[q_proj, k_proj, v_proj, o_proj]",
        )
    for name, module in modules:
        children = cast("Iterable[tuple[str, nn.Module]]", module.named_children())
        read = [each for each, child in children if isinstance(child, LoraLayer)]
        read = sorted(_STATE_SPACE_LAYERS.intersection(read)) if _is_state_space(module) else []
        if read:
            raise ModelError(
                f"lora.targets={config.targets} matches {name}.{read[0]}, whose weights the "
                "kernels of state spaces read without an adapter",
                hint=f"add it to lora.exclude, or leave it out: lora.exclude=[{', '.join(read)}]",
            )


def _matched(model: "nn.Module", folder: str | Path) -> "list[tuple[Tensor, Tensor]]":
    """Pair the tensors of the model's adapter with those of a folder; raises ModelError."""
    whole = _stored(folder)
    stored = {name: tensor for name, tensor in whole.items() if not name.endswith(BESIDE)}
    mine = policy_tensors(model)
    wrong = sorted(
        name
        for name in {*stored, *mine}
        if name not in mine or name not in stored or mine[name].shape != stored[name].shape
    )
    if wrong:
        targets = sorted({layer_of(name) for name in stored})
        raise ModelError(
            f"the adapter in {folder} has other tensors than the configuration makes, first "
            f"{wrong[0]}; it was made with {layer_settings(folder)}",
            hint="set lora.rank, lora.rank_pattern, lora.targets and lora.exclude as they were "
            f"when it was made; its layers are lora.targets=[{','.join(targets[:_SHOWN])}"
            f"{',…' if len(targets) > _SHOWN else ''}]",
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


def _names(folder: str | Path) -> list[str]:
    """Return the names of a folder's tensors without copies of the base's, from the header."""
    from safetensors import SafetensorError, safe_open

    file = Path(folder) / _WEIGHTS
    try:
        with cast(Any, safe_open(file, framework="np")) as opened:
            names: list[str] = opened.keys()
        return [name for name in names if not name.endswith(BESIDE)]
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the adapter {file} cannot be read: {error}", hint="copy it again"
        ) from error


def _check_same(folder: str | Path, config: LoraConfig, layers: Sequence[str]) -> None:
    """Raise ModelError if the scales of a folder's adapter differ from those of `config`."""
    theirs = config_of(folder)
    for key, value, set_to in (
        ("rank", theirs.rank, config.rank),
        ("alpha", theirs.alpha, config.alpha),
    ):
        if value != set_to:
            raise ModelError(
                f"the adapter in {folder} has {key} {value}, lora.{key} is {set_to}",
                hint=f"set lora.{key}={value}, or train all weights: lora.rank=0",
            )
    other = next(
        (layer for layer in layers if theirs.scale_of(layer) != config.scale_of(layer)), None
    )
    if other is None:
        return
    named = {
        "use_rslora": ("rslora", theirs.rslora, config.rslora),
        "alpha_pattern": ("alpha_pattern", theirs.alpha_pattern, config.alpha_pattern),
        "rank_pattern": ("rank_pattern", theirs.rank_pattern, config.rank_pattern),
    }
    differing = {name: layer for name, layer in named.items() if layer[1] != layer[2]}
    settings = ", ".join(f"{name} {value!r}" for name, (_, value, _) in differing.items())
    hint = ", ".join(f"lora.{key}={json.dumps(value)}" for key, value, _ in differing.values())
    raise ModelError(
        f"the adapter in {folder} was made with {settings}: in {other} it is multiplied by "
        f"{theirs.scale_of(other):g}, by the configuration by {config.scale_of(other):g}",
        hint=f"set {hint}",
    )


def _picks_layers(settings: Mapping[str, Any]) -> bool:
    """Whether layers are selected by anything but lists of names."""
    targets, exclude = settings.get("target_modules"), settings.get("exclude_modules")
    by_expression = isinstance(targets, str) and targets != "all-linear"
    some = settings.get("layers_to_transform") is not None or bool(settings.get("layers_pattern"))
    return by_expression or isinstance(exclude, str) or some


def _refuse_settings(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelError that names an unsupported setting of PEFT."""
    kind = settings.get("peft_type", _LORA)
    if str(kind).upper() != _LORA:
        raise _refused(folder, "peft_type", kind, "only LoRA adapters are supported")
    for name, why in _REFUSED.items():
        if settings.get(name) not in _OFF:
            raise _refused(folder, name, settings[name], why)
    drawn = settings.get("init_lora_weights", True)
    if (drawn.lower() if isinstance(drawn, str) else drawn) not in _STARTS and drawn is not None:
        why = "it belongs to other weights than the base's, or is computed differently"
        raise _refused(folder, "init_lora_weights", drawn, why)
    _refuse_unknown(folder, settings)


def _refuse_unknown(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelError for an unknown setting, such as one of a newer PEFT."""
    for name, value in settings.items():
        known = name in _HONOURED or name in _WITHOUT_EFFECT or name in _REFUSED
        if not known and value not in _OFF:
            raise _refused(folder, name, value, "it is unknown")


def _refused(folder: str | Path, name: str, value: Any, why: str) -> ModelError:
    return ModelError(
        f"the adapter in {folder} has {name}={reprlib.repr(value)}, which is not supported: {why}",
        hint="merge it into its model with PEFT (`merge_and_unload`), and take that",
    )
