"""Check what a model is, and what computes it here, by its configuration alone.

Learner and engine try a small random copy of the model (`policy/small_copy.py`), with the probes
that they run when they load one. So a model that they refuse is refused before it is submitted, and
before its weights are fetched.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ..schemas.checks import Check, CheckSkipped
from ..schemas.config.job import JobConfig
from ..schemas.config.sections import LoraConfig
from ..schemas.plan import model_refusals
from ..schemas.plan.cache_shape import cache_widths, layer_kinds
from ..schemas.plan.memory import GIB
from ..schemas.plan.model_shape import count_positions
from ..schemas.wire.errors import ModelError
from .policy import model_folder
from .policy.small_copy import make_small_copy
from .storage.adapters import root_of

_KIB = 1 << 10
_STATE_BYTES = 16
"""Of a trained weight: float32 weight and gradient, and AdamW's two moments."""


def kind_checks(job: JobConfig, *, alone: bool = False) -> Iterator[Check]:
    """Yield the checks of the kind of a job's model; `alone`: of a model without a job, and more.

    Nothing is read but its configuration, and `alone` its tokenizer.
    """
    model = _ModelKind(job)
    yield Check("family", model.family, is_required=True)
    yield Check("layers", model.layers)
    yield Check("learner", model.learner)
    engine = job.generator.engine if job.generator.count else "none"
    if alone or engine == "transformers":
        yield Check("transformers engine", model.transformers_engine)
    if alone or engine == "vllm":
        yield Check("vLLM engine", model.vllm_engine)
    if alone:
        yield Check("LoRA", model.lora)
        yield Check("images", model.images)
        yield Check("tokenizer", model.tokenizer)
        yield Check("memory", model.memory)


class _ModelKind:
    """One model's configuration, and what is made of it."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._path = root_of(job.model.path)

    @cached_property
    def _config(self) -> Any:
        """The model's configuration; raises ModelError."""
        trusts = self._job.model.trust_remote_code
        return model_folder.load_model_config(self._path, trust_remote_code=trusts, hollow=True)

    @property
    def _text(self) -> Any:
        return self._config.get_text_config()

    @property
    def _class(self) -> Any:
        return model_folder.class_of(self._config)

    def family(self) -> str:
        """Return family and class; refuse what neither learner nor engine computes."""
        from .policy.layers import cache_layers

        values: dict[str, Any] = self._config.to_dict()
        library = model_folder.library_version()
        model_refusals.refuse_without_decoder(self._path, values)
        if self._class is None and not hasattr(self._config, "auto_map"):
            raise ModelError(
                f"{library} has no text decoder for model_type {self._config.model_type!r}",
                hint="name a language model, such as Qwen3 or Llama; of models with images "
                f"{', '.join(sorted(model_folder.VISION_TYPES))} are supported",
            )
        model_refusals.refuse_quantised(self._path, values)
        model_refusals.refuse_long_windows(self._path, values)
        cache_layers(self._text)
        by = "its own code" if self._class is None else self._class.__name__
        return f"{self._config.model_type}: {by}, {library}"

    def layers(self) -> str:
        """Count the layers of each kind."""
        from .policy.layers import reach_of_config

        try:
            kinds = layer_kinds(self._text.to_dict())
        except (KeyError, TypeError, ValueError) as error:
            raise CheckSkipped(f"config.json does not list them: {error}") from error
        counted = [f"{num} {kind.replace('_', ' ')}" for kind, num in Counter(kinds).items()]
        seen = reach_of_config(self._text).full_until
        limit = "" if seen is None else f"; windows or chunks of {seen} tokens"
        positions = count_positions(self._config.to_dict())
        return f"{', '.join(counted)}{limit}; positions for {positions or 'any number of'} tokens"

    def learner(self) -> str:
        """Try the learner's probe of packed rows."""
        from .training.model import try_rows

        if try_rows(self._config):
            return "a row for each sequence, since its recurrent layers go on to the end of a row"
        return "packed rows: many sequences in each, a common prompt once"

    def transformers_engine(self) -> str:
        """Try the engine's comparison with a plain pass."""
        from .engine.transformers.decoder import try_slots

        if self._job.generator.engine != "transformers":
            raise CheckSkipped(f"generator.engine={self._job.generator.engine}")
        if try_slots(self._path, self._config).cache.is_recurrent:
            return "takes it: a state of fixed size for each request, beside keys and values"
        return "takes it: keys and values of all tokens"

    def vllm_engine(self) -> str:
        """Refuse a family that vLLM does not compute."""
        try:
            adapts = self._job.lora.rank > 0
            model_refusals.refuse_in_vllm(self._path, self._config.to_dict(), adapts=adapts)
        except ModelError as error:
            if self._job.generator.engine == "vllm":
                raise
            raise CheckSkipped(error.message) from error
        raise CheckSkipped("see the documentation of the vLLM that generators have")

    def lora(self) -> str:
        """Put an adapter on each layer that a run adapts by default."""
        from .policy.lora import add_adapter, layer_names

        small = make_small_copy(self._config)
        add_adapter(small, LoraConfig(rank=1), seed=0)
        return f"lora.targets=all-linear adapts {', '.join(layer_names(small))}"

    def images(self) -> str:
        """Tell whether the model takes images here."""
        if model_folder.sees_images(self._config):
            return "taken"
        return "none" if self._text is self._config else "none: its text decoder alone is used"

    def tokenizer(self) -> str:
        """Compare the tokenizer with the embedding."""
        if Path(self._path).is_dir() and not model_folder.has_tokenizer(self._path):
            raise CheckSkipped(f"{self._path} has no tokenizer")
        tokenizer = model_folder.load_tokenizer(self._path)
        model_folder.check_tokenizer(tokenizer, self._config, self._path)
        return f"{len(tokenizer)} tokens, the embedding has {self._text.vocab_size}"

    def memory(self) -> str:
        """Return the memory of the weights, and of a request's cache in 16 bits."""
        import torch

        with torch.device("meta"):
            built: Any = model_folder.load_causal_lm(
                self._path,
                dtype=torch.float32,
                trust_remote_code=self._job.model.trust_remote_code,
                hollow=True,
            )
        weights: int = built.num_parameters()
        try:
            cache = cache_widths(self._text.to_dict())
        except (KeyError, TypeError, ValueError) as error:
            raise CheckSkipped(f"config.json has no {error}: the cache is not counted") from error
        state = cache.state_bytes(2)
        return (
            f"{weights / 1e9:.3g} B weights: {weights * _STATE_BYTES / GIB:.3g} GiB to train them "
            f"all, {2 * weights / GIB:.3g} GiB to serve them in 16 bits; keys and values "
            f"{cache.token_bytes(2) / _KIB:.3g} KiB a token"
            + (f", recurrent states {state / _KIB:.4g} KiB a request" if state else "")
        )
