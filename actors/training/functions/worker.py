"""The process of a learner's own functions: `python -m …training.functions.worker THREADS`.

It imports and calls functions of the job's owner, and answers over the socket that is its standard
input. It sees no GPU. Whatever a function raises or returns becomes a plain answer; the learner
checks it again (`calls.py`), since a function may do anything to this process.

Shape letters: N generated tokens, I tasks.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import importlib
import inspect
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ....schemas.wire.errors import ConfigError
from ....schemas.wire.foreign import look_here, place_of, shown, words_of
from .wire import (
    MAX_REQUEST_BYTES,
    Arrays,
    Kind,
    join_inputs,
    receive,
    send,
    to_array,
    to_tensor,
)

ENTRY_POINTS = "tinkermq.algorithms"
"""Group under which packages register functions by a short name."""
_LATER = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
Answer = tuple[dict[str, Any], Arrays]


class FunctionServer:
    """The functions that were loaded, and the graph of the loss that was computed last."""

    def __init__(self) -> None:
        self._functions: dict[Kind, Callable[[Any], Any]] = {}
        self._graph: tuple[Tensor, list[Tensor]] | None = None

    def answer(self, request: dict[str, Any], arrays: Arrays) -> Answer:
        """Return the answer to a request; errors of functions are answers."""
        try:
            match request["do"]:
                case "load":
                    self._functions[request["kind"]] = find_function(request["target"])
                    return {}, {}
                case "call":
                    return self._called(request, arrays)
                case _:
                    return {}, self._derivatives(to_tensor(arrays["grad_N"]))
        except torch.OutOfMemoryError as error:
            return {"out_of_memory": words_of(error)}, {}
        except ConfigError as error:
            return {"failed": error.message, "hint": error.hint}, {}
        except BaseException as error:  # noqa: BLE001 - the edge to code of the job's owner
            place = place_of(error, (__file__,)) or "within a library"
            return {"failed": f"raised {words_of(error)} ({place})", "hint": ""}, {}

    def _called(self, request: dict[str, Any], arrays: Arrays) -> Answer:
        kind, names = cast("Kind", request["kind"]), cast("list[str]", request["derived"])
        inputs = join_inputs(kind, request["values"], arrays)
        derived = [cast("Tensor", getattr(inputs, name)).requires_grad_() for name in names]
        if kind == "loss":
            self._graph = None
        with torch.enable_grad():
            value = self._functions[kind](inputs)
        if kind == "filter":
            return _decision(value)
        if kind == "curriculum":
            return _sized(_numbers(value), len(arrays["tries_I"]))
        if not isinstance(value, Tensor):
            return {"type": type(value).__name__[:100]}, {}
        if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
            value = value.float()
        if names and value.requires_grad:
            self._graph = (value, derived)
        about = {"type": str(value.dtype), "has_gradient": value.requires_grad}
        if value.dtype not in (torch.float32, torch.float64, torch.bool):
            return {**about, "shape": list(value.shape)[:8]}, {}
        more, result = _sized(to_array(value), len(arrays["seq_N"]))
        return {**about, **more}, result

    def _derivatives(self, grad_N: Tensor) -> Arrays:
        """Return the derivative of the last loss by each of its inputs, weighted by `grad_N`."""
        if self._graph is None:
            raise ConfigError("has no loss to derive")
        (loss_N, inputs), self._graph = self._graph, None
        derive = cast("Callable[..., tuple[Tensor | None, ...]]", torch.autograd.grad)
        grads = derive(loss_N, inputs, grad_N, allow_unused=True)
        return {
            str(place): to_array(torch.zeros_like(of) if grad is None else grad)
            for place, (of, grad) in enumerate(zip(inputs, grads, strict=True))
        }


def _sized(result: Any, num: int) -> Answer:
    """Return an array as an answer; of one with another shape, the shape alone."""
    fits = result.shape == (num,)
    return {"shape": list(result.shape)[:8]}, {"result": result} if fits else {}


def _decision(value: Any) -> Answer:
    if isinstance(value, np.ndarray | np.generic):
        value = cast("Any", value).tolist()
    if not isinstance(value, bool):
        return {"shown": shown(value)}, {}
    return {"decision": value}, {}


def _numbers(value: Any) -> Any:
    """Return weights as an array; NaN for a value without numbers."""
    try:
        return np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError, OverflowError):
        return np.array(np.nan)


def find_function(target: str) -> Callable[[Any], Any]:
    """Import a function; raises ConfigError with the import's error."""
    module_name, _, name = _place(target).partition(":")
    look_here()
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except BaseException as error:
        place = place_of(error, (__file__,))
        raise ConfigError(
            f"cannot be imported: {words_of(error)}",
            hint=f"{f'raised at {place}; ' if place else ''}see that `python -c 'import "
            f"{module_name}'` works where the learner runs",
        ) from error
    if not callable(function):
        raise ConfigError(
            f"names nothing: module {module_name} has no function {name!r}",
            hint="name a function of the module, as module:function",
        )
    if any(kind(function) for kind in _LATER):
        raise ConfigError(
            "is async or a generator, but is called within a step",
            hint="write it with def, and return the value",
        )
    return function


def _place(target: str) -> str:
    """Return `module:function` of a function registered by a package under a short name."""
    if ":" in target:
        return target
    there = {
        entry_point.name: entry_point.value for entry_point in entry_points(group=ENTRY_POINTS)
    }
    if target not in there:
        raise ConfigError(
            "is registered by no package here",
            hint=f"registered under {ENTRY_POINTS}: {', '.join(sorted(there)) or 'nothing'}; "
            "or write module:function",
        )
    return there[target]


def main() -> None:
    """Answer requests until the learner closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner ends this process
    torch.set_num_threads(int(sys.argv[1]))
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what a function prints is in the learner's log
    server = FunctionServer()
    while True:
        try:
            request, arrays = receive(connection, max_array_bytes=MAX_REQUEST_BYTES)
            send(connection, *server.answer(request, arrays))
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    main()
