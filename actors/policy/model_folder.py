"""Open, check and write Hugging Face model folders, and explain their errors."""

import socket
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog

from ...schemas.config.job import JobConfig
from ...schemas.config.sections import LoraConfig, model_paths
from ...schemas.local.folder import temporary_folder
from ...schemas.model_catalogue import find_model
from ...schemas.plan.cache_shape import text_config
from ...schemas.plan.model_refusals import refuse_without_decoder
from ...schemas.plan.model_shape import stored_shapes
from ...schemas.wire.errors import ModelError, TinkermqError
from ..storage.adapters import base_of, is_adapter
from ..storage.files import check_digests
from ..storage.held_models import held_models
from ..storage.model_files import check_model_files, refuse_code
from .lora import add_adapter, merge, refuse_unmatched, share_weights, untie
from .older_forms import add_older_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

# -- models of the hub -----------------------------------------------------------------------------

_log = structlog.get_logger()
_HUB_S = 5.0


def hub_error(path: str, error: Exception, *, offline: bool) -> ModelError:
    """Return the error for a model of the hub that transformers could not open.

    The kind follows from the classes of the causes of `error`. `offline`: the hub is not contacted.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    behind = list(_behind(error))

    def came_from(*kinds: type[Exception]) -> bool:
        return any(isinstance(cause, kinds) for cause in behind)

    here = (
        f"model {path} is neither a folder on {socket.gethostname()} nor in its Hugging Face cache"
    )
    if offline and came_from(LocalEntryNotFoundError, OfflineModeIsEnabled):
        return ModelError(
            f"{here}, and offline mode (HF_HUB_OFFLINE) forbids contacting the hub",
            hint="unset HF_HUB_OFFLINE for the node, or copy the model there and name its "
            "folder absolutely",
        )
    if came_from(GatedRepoError):
        return ModelError(
            f"model {path} is gated on the hub, and this node may not read it",
            hint="accept its terms on the hub, and set HF_TOKEN for the node",
        )
    if came_from(RepositoryNotFoundError):
        return ModelError(
            f"{here}, and the hub has no such model, or a private one",
            hint="check owner and name, set HF_TOKEN for the node if it is private, or name a "
            "folder absolutely",
        )
    if came_from(LocalEntryNotFoundError, ConnectionError):
        return ModelError(
            f"{here}, and the hub cannot be reached from there",
            hint="copy the model there and name its folder absolutely, or give the node access to "
            "the hub (HF_ENDPOINT, HTTPS_PROXY)",
        )
    return ModelError(
        f"the configuration of model {path} cannot be read: {error}",
        hint="check that the hub's model has a config.json whose model_type transformers knows",
    )


def check_hub_model(path: str) -> None:
    """Raise ModelError for a model of the hub that is neither cached nor available there.

    The hub is queried once. Other errors are found when the model is loaded.
    """
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]  # untyped there
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_HUB_S)
    except (OfflineModeIsEnabled, RepositoryNotFoundError) as error:
        raise hub_error(path, error, offline=constants.HF_HUB_OFFLINE) from error
    except (HfHubHTTPError, HFValidationError):
        return
    except Exception as error:  # of the HTTP library of this huggingface_hub
        raise hub_error(path, ConnectionError(str(error)), offline=False) from error


def fetch_configs(job: JobConfig) -> None:
    """Fetch config.json of a job's models of the hub, by which their shapes are known.

    What is wrong with a model is reported when it is loaded.
    """
    from huggingface_hub import (
        hf_hub_download,  # pyright: ignore[reportUnknownVariableType]  # untyped there
        try_to_load_from_cache,
    )

    for path in {*model_paths(job).values()}:
        named = _is_hub_name(path) and not Path(path).is_dir()
        if not named or isinstance(try_to_load_from_cache(path, "config.json"), str):
            continue
        try:
            hf_hub_download(path, "config.json", etag_timeout=_HUB_S)
        except Exception as error:  # noqa: BLE001  also of the HTTP library of this huggingface_hub
            _log.warning("model_config_not_fetched", model=path, reason=str(error))


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Kinds of models with images that `actors/policy/vision.py` supports."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model_folder(path: str, *, hollow: bool = False) -> None:
    """Raise ModelError that names the missing file unless `path` has a model or an adapter.

    A `hollow` model needs no weights. A name such as `Qwen/Qwen3-0.6B` that is not a folder here is
    not checked. Raises StorageError for a checkpoint with a damaged file.
    """
    check_digests(Path(path))
    _check_files(path, hollow=hollow)


def check_model_is_here(path: str) -> None:
    """Raise ModelError for a model that this machine cannot load; reads headers, not weights.

    Names are looked up at the hub; models of the catalogue must have been fetched.
    """
    path = find_model(path)
    _check_files(path)
    if not Path(path).is_dir():
        check_hub_model(path)
    elif is_adapter(path):
        check_model_is_here(base_of(path))
    else:
        stored_shapes(Path(path))


def check_model_alike(path: str) -> None:
    """Like `check_model_is_here`, with one message for everything that is not a model.

    For paths from users who may not learn which files this machine has.
    """
    try:
        if _is_hub_name(path) and not Path(path).is_dir():
            check_hub_model(path)
        else:
            check_model_is_here(path)
    except (TinkermqError, OSError, ValueError, RecursionError) as error:
        if _is_hub_name(path) and not Path(path).is_dir():
            raise
        raise ModelError(
            f"there is no model at {path}",
            hint="name the folder of a model, with config.json and *.safetensors; other kinds "
            "of files are not reported",
        ) from error


def _check_files(path: str, *, hollow: bool = False) -> None:
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_file():
            raise ModelError(
                f"model.path is a file: {path}",
                hint=f"convert it: `tinkermq model get {path} --output FOLDER`"
                if folder.suffix == ".gguf"
                else "name the folder with config.json and the weights",
            )
        if _is_hub_name(path):
            return
        raise ModelError(
            f"there is no model folder {path}",
            hint="make it with `save_pretrained`, or name a model of the hub as owner/name",
        )
    if is_adapter(folder):
        return
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{path} is not a model folder: config.json is missing",
            hint="a model folder is what `model.save_pretrained(folder)` writes",
        )
    check_model_files(folder)
    if not hollow and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ModelError(
            f"{path} has no weights: model.safetensors is missing",
            hint="copy the *.safetensors files beside config.json",
        )


def load_model_config(
    path: str, *, trust_remote_code: bool = False, hollow: bool = False
) -> "PreTrainedConfig":
    """Read a model's configuration; raises ModelError if it is missing or unknown."""
    from transformers import AutoConfig, PreTrainedConfig

    check_model_folder(path, hollow=hollow)
    if is_adapter(path):
        return load_model_config(base_of(path), trust_remote_code=trust_remote_code, hollow=hollow)
    fields: dict[str, Any] = {}
    try:
        fields = cast("dict[str, Any]", cast("Any", PreTrainedConfig).get_config_dict(path)[0])
        refuse_code(fields, f"config.json of model {path}")
        config = cast(
            "PreTrainedConfig",
            AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code),  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        )
        config.name_or_path = held_models.named(path)
        return config
    except ModelError:
        raise
    except Exception as error:  # of a library, or of the model's own code
        if not Path(path).is_dir():
            from huggingface_hub import constants

            raise hub_error(path, error, offline=constants.HF_HUB_OFFLINE) from error
        raise _unknown_kind(path, fields, error) from error


def library_version() -> str:
    """Return the name and version of transformers."""
    return f"transformers {version('transformers')}"


def _unknown_kind(path: str, fields: Mapping[str, Any], error: Exception) -> ModelError:
    """Return the error for a config.json that transformers does not read."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, text, library = fields.get("model_type"), text_config(fields), library_version()
    if kind not in CONFIG_MAPPING and fields.get("auto_map"):
        return ModelError(
            f"model {path} is computed by code in its own folder, since {library} has no "
            f"model_type {kind!r}",
            hint="take a model that transformers has, or, if you trust its code, set "
            "model.trust_remote_code=true",
        )
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        return ModelError(
            f"{library} has no model_type {kind!r}, which config.json of model {path} names",
            hint="correct it, or take a model that transformers has",
        )
    listed: Any = text.get("layer_types")
    names = cast("list[Any]", listed) if isinstance(listed, list) else []
    unknown = sorted({str(name) for name in names} - set(ALLOWED_LAYER_TYPES))
    if unknown:
        return ModelError(
            f"config.json of model {path} has layers of kind {', '.join(unknown)}, which {library} "
            "does not know",
            hint=f"known are {', '.join(ALLOWED_LAYER_TYPES)}",
        )
    return ModelError(
        f"the configuration of model {path} cannot be read: {error}",
        hint="check that config.json is complete and transformers knows its model_type",
    )


def sees_images(config: "PreTrainedConfig") -> bool:
    """Whether a model takes images."""
    return config.model_type in VISION_TYPES


def auto_class(config: "PreTrainedConfig") -> Any:
    """Return transformers' class for a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def class_of(config: "PreTrainedConfig") -> Any:
    """Return the class of transformers that generates text; None: it has none."""
    return auto_class(config)._model_mapping.get(type(config), None)


def load_causal_lm(
    path: str,
    *,
    dtype: "torch.dtype",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    hollow: bool = False,
) -> "PreTrainedModel":
    """Load a causal language model in evaluation mode, on the CPU, with its vision tower if any.

    An adapter is merged into its base. The weights of a hollow model are not read, and take memory
    only when the caller writes them.

    Raises ModelError for an invalid folder or missing weights.
    """
    check_model_folder(path, hollow=hollow)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    if is_adapter(path):
        base = load_causal_lm(base_of(path), hollow=hollow, **options)
        untie(base, path)
        return base if hollow else merge(base, path).eval()
    config = load_model_config(path, trust_remote_code=trust_remote_code, hollow=hollow)
    refuse_without_decoder(path, config.to_dict())  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
    auto = auto_class(config)
    return _build_hollow(auto, config, options) if hollow else _load_weights(auto, path, options)


def _load_weights(auto: Any, path: str, options: dict[str, Any]) -> "PreTrainedModel":
    """Load a model by one of transformers' classes.

    Raises ModelError for missing weights and unknown models.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            auto.from_pretrained(path, output_loading_info=True, **options),
        )
    except SafetensorError as error:
        raise ModelError(
            f"a *.safetensors file of model {path} is damaged or cut: {error}",
            hint="copy or download the model's files again",
        ) from error
    except Exception as error:  # of a library, or of the model's own code
        raise ModelError(
            f"model {path} cannot be loaded: {error}",
            hint=f"`{auto.__name__}.from_pretrained` must be able to open it",
        ) from error
    model, info = loaded
    model.name_or_path = model.config.name_or_path = held_models.named(path)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights of model {path} lack {len(missing)} tensors: {', '.join(missing[:5])}",
            hint="copy all *.safetensors files of the model; they would be random otherwise",
        )
    return model.eval()


def _build_hollow(
    auto: Any, config: "PreTrainedConfig", options: dict[str, Any]
) -> "PreTrainedModel":
    """Make a model without reading weights, which the caller will write."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = auto.from_config(config, **options)
    model.tie_weights()
    return cast("PreTrainedModel", model.eval())


def load_policy(
    path: str,
    lora: LoraConfig,
    *,
    adapter: str | Path | None = None,
    base: "PreTrainedModel | None" = None,
    seed: int = 0,
    dtype: "torch.dtype",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    hollow: bool = False,
) -> "PreTrainedModel":
    """Load the model of a job: without an adapter or, with a rank, with one.

    The adapter is that of the folder `adapter`, else of `path` if that is one, else a new one. With
    `base` its weights are shared. Raises ModelError.
    """
    begins_with = path if is_adapter(path) and lora.rank else None
    model = (
        share_weights(base)
        if base is not None
        else load_causal_lm(
            base_of(path) if begins_with else path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            hollow=hollow,
        )
    )
    if lora.rank:
        folder = adapter or begins_with
        add_adapter(model, lora, seed=seed, folder=folder)
        if folder is None:
            refuse_unmatched(model, lora)
    return model


def has_tokenizer(path: str) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((Path(path) / name).is_file() for name in _TOKENIZERS)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a model's tokenizer; raises ModelError that names a missing file."""
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not has_tokenizer(path):
        if is_adapter(folder):  # an adapter without a tokenizer has that of its base
            return load_tokenizer(base_of(folder), trust_remote_code=trust_remote_code)
        raise ModelError(
            f"{path} has no tokenizer: tokenizer.json is missing",
            hint="write it with `tokenizer.save_pretrained(folder)`",
        )
    try:
        return cast(
            "PreTrainedTokenizerBase",
            AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code),  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        )
    except Exception as error:  # of a library, or of the model's own code
        raise ModelError(
            f"the tokenizer of model {path} cannot be read: {error}",
            hint="`AutoTokenizer.from_pretrained` must be able to open it",
        ) from error


@lru_cache(maxsize=8)
def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a digest of all tokens and their ids: equal for equal tokenizers."""
    known: dict[str, int] = tokenizer.get_vocab()
    digest = sha256()
    for token, number in sorted(known.items()):
        digest.update(f"{number} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


_NAMED = 8
"""Number of tokens that an error names."""


def check_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", config: "PreTrainedConfig", path: str
) -> None:
    """Raise ModelError for a tokenizer with tokens outside the model's vocabulary."""
    known = int(cast("Any", config).get_text_config().vocab_size)
    ids: dict[str, int] = tokenizer.get_vocab()
    # ids may have gaps, so the last one counts, not their number
    num_tokens = max(len(tokenizer), 1 + max(ids.values(), default=0))
    if num_tokens > known:
        unknown = [
            token for number, token in sorted((n, t) for t, n in ids.items()) if number >= known
        ]
        named = f", not {', '.join(map(repr, unknown[:_NAMED]))}" if unknown else ""
        raise ModelError(
            f"the tokenizer does not match model {path}: it has {num_tokens} tokens, the model "
            f"knows {known}{named}",
            hint="use the tokenizer that was saved with the model; or give the model rows for "
            f"these, and save both: model.resize_token_embeddings({num_tokens}). transformers "
            "adds tokens that the tokenizer's class for this model_type always has",
        )


def load_generation_config(path: str) -> "GenerationConfig | None":
    """Return a model's generation settings; None without generation_config.json.

    Raises ModelError for a file that cannot be read.
    """
    from transformers import GenerationConfig

    file = Path(path) / "generation_config.json"
    if not file.is_file() and is_adapter(path):
        return load_generation_config(base_of(path))
    try:
        return GenerationConfig.from_pretrained(path)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
    except Exception as error:  # transformers raises many kinds of errors
        if isinstance(error, OSError) and not file.is_file():
            return None  # the file is optional
        raise ModelError(
            f"generation_config.json of model {path} cannot be read: {error}",
            hint="`GenerationConfig.from_pretrained` must open it; or remove it: it is optional",
        ) from error


def load_stop_token_ids(path: str) -> tuple[int, ...]:
    """Return the tokens that end a generation, from generation_config.json or else config.json.

    Raises ModelError for a file that cannot be read.
    """
    settings = load_generation_config(path)
    return _stops_of_config(path) if settings is None else stops_of(settings)


def _stops_of_config(path: str) -> tuple[int, ...]:
    from transformers import PreTrainedConfig

    folder = base_of(path) if is_adapter(path) else path
    fields = cast("dict[str, Any]", cast("Any", PreTrainedConfig).get_config_dict(folder)[0])
    of_text = cast("dict[str, Any]", fields.get("text_config") or {})
    ids: int | list[int] | None = fields.get("eos_token_id", of_text.get("eos_token_id"))
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def stops_of(settings: "GenerationConfig") -> tuple[int, ...]:
    """Return the tokens that end a generation, from a model's settings."""
    ids: int | list[int] | None = cast("Any", settings).eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")


# -- models written to folders ---------------------------------------------------------------------
# transformers reads some settings that it refuses to write, such as sampling values without
# `do_sample` in generation_config.json. Such a model is written with its original settings. Models
# that cannot be written at all are found by writing one before training.

_GENERATION_CONFIG = "generation_config.json"


def save_model(
    model: Any, folder: str | Path, state_dict: "Mapping[str, Tensor] | None" = None
) -> None:
    """Write a model, or its adapter, with its original generation settings and older keys.

    `state_dict` are its weights, by default the current ones; for an empty one no file is written.
    """
    if state_dict is not None:
        state_dict = dict(state_dict)  # transformers empties the dictionary that it writes
    settings = getattr(model, "generation_config", None)
    if settings is None or not model.can_generate():
        model.save_pretrained(folder, state_dict=state_dict)
        add_older_config(Path(folder))
        return
    model.generation_config = type(settings)()
    try:
        model.save_pretrained(folder, state_dict=state_dict)
    finally:
        model.generation_config = settings
    add_older_config(Path(folder))
    file = Path(folder) / _GENERATION_CONFIG
    settings.to_json_file(file, use_diff=True, keys_to_pop=["compile_config"])


def unsavable(what: str, error: BaseException) -> ModelError:
    """Return the error for a model that a library cannot write or read again."""
    return ModelError(
        f"{what} cannot be saved as a checkpoint: {type(error).__name__}: {error}",
        hint="mend the model's folder (config.json, generation_config.json, tokenizer files) so "
        "that transformers' `save_pretrained` takes it; nothing was trained yet",
    )


def check_reread(
    folder: str | Path,
    tokenizer: Any,
    settings: "GenerationConfig | None" = None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError unless a written folder opens with the same tokens and end tokens.

    `settings` are the original generation settings, if any.
    """
    path = str(folder)
    load_model_config(path, trust_remote_code=trust_remote_code, hollow=True)
    again: Any = load_tokenizer(path, trust_remote_code=trust_remote_code)
    changed: dict[str, bool] = {
        "its vocabulary": vocabulary_digest(again) != vocabulary_digest(tokenizer),
        "its chat template": again.chat_template != tokenizer.chat_template,
        "its special tokens": set(again.all_special_tokens) != set(tokenizer.all_special_tokens),
    }
    for what, is_changed in changed.items():
        if is_changed:
            raise ModelError(
                f"the tokenizer changes when it is saved and opened again: {what} changed",
                hint="save it by `tokenizer.save_pretrained(folder)` and see what "
                "`AutoTokenizer.from_pretrained(folder)` makes of it",
            )
    if settings is not None and load_stop_token_ids(path) != stops_of(settings):
        raise ModelError(
            f"the model generates up to tokens {stops_of(settings)}, and up to "
            f"{load_stop_token_ids(path)} once it is saved",
            hint="see eos_token_id in its generation_config.json",
        )


def check_saving(
    path: str, tokenizer_path: str | None = None, *, trust_remote_code: bool = False
) -> None:
    """Raise ModelError for a model that cannot be written as a checkpoint; reads no weights.

    For submissions: everything but the tensors is written as a learner does, and read again.
    """
    import torch

    from .vision import Processor, load_image_reader

    config = load_model_config(path, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(tokenizer_path or path, trust_remote_code=trust_remote_code)
    processor = Processor(tokenizer, load_image_reader(path, trust_remote_code=trust_remote_code))
    settings = load_generation_config(path)
    with temporary_folder("saving") as folder:
        try:
            with torch.device("meta"):
                options = {"trust_remote_code": trust_remote_code}
                model: Any = auto_class(config).from_config(config, **options)
            if settings is not None:
                model.generation_config = settings
            save_model(model, folder, {})
            processor.save_pretrained(folder)
        except TinkermqError:
            raise
        except Exception as error:  # of a library, or of the model's own code
            raise unsavable(f"model {path}", error) from error
        check_reread(folder, tokenizer, settings, trust_remote_code=trust_remote_code)


def save_plain_weights(tensors: "Mapping[str, Tensor]", file: Path) -> None:
    """Write tensors on the CPU as one safetensors file, also tensors that share memory."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # its types are bare

    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    places = [tensor.untyped_storage().data_ptr() for tensor in plain.values()]
    for (name, tensor), place in zip(list(plain.items()), places, strict=True):
        if places.count(place) > 1:
            plain[name] = tensor.clone()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(plain, file, metadata={"format": "pt"})
