from typing import Any

expand_batch_to_tokens: Any
