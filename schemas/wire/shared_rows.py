"""Rows of an episode as they travel: a beginning shared with the previous row is sent once.

Rows of an agent's episode are paths of one tree of calls. Where histories are rendered anew at each
call, rows repeat nearly all of it.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_VECTORS = {"token_ids": None, "mask": 0, "logprobs": 0.0, "versions": -1}
"""Per-token arrays, and their value for tokens not generated in this row."""
_MOST_TOKENS = 1 << 23
"""Shared tokens of a group's rows: a bound of unpacking."""
_MOST_MESSAGES = 1 << 19
"""Shared messages, likewise."""

Row = dict[str, Any]


def without_shared(rows: Sequence[Row]) -> list[Row]:
    """Remove from each row the beginning that it shares with the previous one."""
    shortened: list[Row] = []
    before: Row | None = None
    for row in rows:
        is_next = before is not None and row["episode"] >= 0 and _same_episode(before, row)
        shortened.append(_behind(before, row) if is_next and before is not None else row)
        before = row
    return shortened


def with_shared(rows: Sequence[Any]) -> list[Any]:
    """Restore removed beginnings; ValueError for rows that cannot be complete."""
    found: list[Any] = []
    num_tokens, num_messages = 0, 0
    for row in rows:
        whole = row
        if isinstance(row, dict) and (cast("Row", row).get("shared") or None) is not None:
            fields = cast("Row", row)
            tokens, messages = _numbers(fields["shared"])
            num_tokens, num_messages = num_tokens + tokens, num_messages + messages
            if num_tokens > _MOST_TOKENS or num_messages > _MOST_MESSAGES:
                raise ValueError(
                    f"rows share more than {_MOST_TOKENS:,} tokens or {_MOST_MESSAGES:,} messages"
                )
            whole = _behind_again(found[-1] if found else None, fields, tokens, messages)
        found.append(whole)
    return found


def _same_episode(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("role", "episode", "greedy"))


def _behind(before: Row, row: Row) -> Row:
    tokens = _num_tokens(before, row)
    messages = 0
    for one, other in zip(before["messages"], row["messages"], strict=False):
        if one != other:
            break
        messages += 1
    if not tokens and not messages:
        return row
    vectors = {name: row[name][tokens:] for name in _VECTORS}
    return {
        **row,
        **vectors,
        "messages": row["messages"][messages:],
        "shared": [tokens, messages],
    }


def _num_tokens(before: Row, row: Row) -> int:
    """Count the equal leading tokens that were not generated in this row."""
    num_tokens = len(row["mask"])
    for name, value in _VECTORS.items():
        if value is not None and (others := np.flatnonzero(row[name] != value)).size:
            num_tokens = min(num_tokens, int(others[0]))
    length = min(num_tokens, len(before["token_ids"]))
    differs = np.flatnonzero(before["token_ids"][:length] != row["token_ids"][:length])
    return int(differs[0]) if differs.size else length


def _numbers(shared: Any) -> tuple[int, int]:
    match shared:
        case [int(tokens), int(messages)] if tokens >= 0 and messages >= 0:
            return tokens, messages
        case _:
            raise ValueError("`shared` is a number of tokens and one of messages")


def _behind_again(before: Any, row: Row, tokens: int, messages: int) -> Row:
    if not isinstance(before, dict):
        raise ValueError("the first row has none before it to share with")
    ids, said = cast("Row", before).get("token_ids"), cast("Row", before).get("messages")
    if not isinstance(ids, np.ndarray) or not isinstance(said, list):
        raise ValueError("the row before has no tokens or messages to share")
    if len(cast("NDArray[Any]", ids)) < tokens or len(cast("list[Any]", said)) < messages:
        raise ValueError(f"the row before has less than {tokens} tokens or {messages} messages")
    own = row.get("messages", [])
    if not isinstance(own, list):
        raise ValueError("messages are a list")
    first = cast("NDArray[Any]", ids)[:tokens]
    whole = {name: _joined(first, row.get(name), value) for name, value in _VECTORS.items()}
    fields = {name: value for name, value in row.items() if name != "shared"}
    return {**fields, **whole, "messages": [*said[:messages], *own]}


def _joined(ids: NDArray[Any], own: Any, value: float | None) -> NDArray[Any]:
    if not isinstance(own, np.ndarray) or cast("NDArray[Any]", own).ndim != 1:
        raise ValueError("a row has vectors of its tokens")
    vector = cast("NDArray[Any]", own)
    first = ids if value is None else np.full(len(ids), value, vector.dtype)
    return np.concatenate([first, vector]).astype(vector.dtype, copy=False)
