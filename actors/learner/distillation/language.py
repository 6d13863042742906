"""Whether a model can score what the policy writes: the same tokens, and the same images."""

from typing import Any, cast

from ....schemas.config.job import JobConfig
from ....schemas.wire.errors import ModelError
from ...models.model_folder import load_model_config, load_tokenizer, sees_images


def check_same_language(config: JobConfig, path: str, key: str = "algorithm.teacher") -> None:
    """Raise ModelError for a model that does not read the policy's tokens, or its images."""
    trusted = config.model.trust_remote_code
    own = config.model.tokenizer or config.model.path
    vocabularies = [
        load_tokenizer(one, trust_remote_code=trusted).get_vocab() for one in (own, path)
    ]
    if vocabularies[0] != vocabularies[1]:
        differ = len(vocabularies[0].items() ^ vocabularies[1].items())
        raise ModelError(
            f"{key}={path} has another tokenizer than {own}: {differ} entries differ, "
            f"of {len(vocabularies[0])} and {len(vocabularies[1])}",
            hint="it scores the policy's own token ids: take a model of the same family",
        )
    policy, other = (
        load_model_config(one, trust_remote_code=trusted) for one in (config.model.path, path)
    )
    if sees_images(policy) and policy.model_type != other.model_type:
        raise ModelError(
            f"{key}={path} is a {other.model_type}, the policy a {policy.model_type} that sees "
            "images",
            hint="take one of the same kind",
        )
    sizes = [int(cast("Any", one).get_text_config().vocab_size) for one in (policy, other)]
    if sizes[1] < sizes[0]:
        raise ModelError(
            f"{key}={path} knows {sizes[1]} token ids, the policy {sizes[0]}",
            hint="take a model with at least as many",
        )
