from collections.abc import Mapping, Sequence

from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

class TokensInput: ...
class MultiModalInput: ...

def tokens_input(
    prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None
) -> TokensInput: ...
def mm_input(
    prompt_token_ids: list[int],
    mm_kwargs: MultiModalKwargsItems,
    mm_hashes: Mapping[str, list[str]],
    mm_placeholders: Mapping[str, Sequence[PlaceholderRange]],
    *,
    prompt: str | None = None,
    cache_salt: str | None = None,
) -> MultiModalInput: ...
