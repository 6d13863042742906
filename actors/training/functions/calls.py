"""Functions of the user, named by `module:function` or an entry point, as a learner calls them.

They have the signature of the library's functions. They are imported and called in a process of
their own (`worker.py`), so that the learner runs the pool's code alone: inputs and results are
arrays, and of a loss the learner asks for its derivative too, with which it continues backward.
Every answer is checked here; a faulty function, one that ends its process, and one that does not
answer in time end the job with an error that names it.

Calls block, and are made one at a time: from threads that compute, never from an event loop.

Shape letters: N generated tokens, I tasks.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....envs.sandbox.piped import PipedProgram
from ....schemas.config.job import JobConfig
from ....schemas.wire.errors import ConfigError, MessageError
from ....schemas.wire.foreign import clean_text
from ..advantages import AdvantageInputs
from ..losses import LossInputs, TokenLoss
from ..off_policy import Correction, CorrectionInputs
from .process import start_process
from .wire import (
    KINDS,
    Arrays,
    CurriculumInputs,
    FilterInputs,
    Kind,
    receive,
    send,
    split_inputs,
    to_array,
    to_tensor,
)

CALL_S = 120.0
"""Time for one call of a function."""
_LOAD_S = 300.0
"""Time to start the process and import a module, possibly from a slow disk."""
_END_S = 2.0
_NUMBER_BYTES = 8
_MAX_HEAD_BYTES = 1 << 16
_CHECK = "test it with `tinkermq algorithm check {target}`"


class OwnFunctions:
    """The functions of one job in this process, and the process that runs them."""

    def __init__(
        self,
        targets: Mapping[Kind, str],
        *,
        hidden: Path | None = None,
        threads: int = 1,
        call_s: float = CALL_S,
    ) -> None:
        """Start the process and import every function; without any there is no process.

        `hidden` is the run's folder in a pool with users: the process is sandboxed then. Blocks.
        Raises ConfigError with an import's error, and SandboxError.
        """
        self.hidden = hidden
        self._call_s = call_s
        self._lock = threading.Lock()
        self._functions: dict[Kind, CustomFunction] = {}
        self._process: PipedProgram | None = None
        if not targets:
            return
        self._process, self._connection = start_process(threads, hidden)
        try:
            for kind, target in targets.items():
                self.load(kind, target)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(
        cls, config: JobConfig, hidden: Path | None = None, kinds: Sequence[Kind] = KINDS
    ) -> "OwnFunctions":
        """Start the functions of these kinds that a configuration names."""
        named: dict[Kind, str | None] = {
            kind: config.training.own_curriculum
            if kind == "curriculum"
            else getattr(config.algorithm, f"own_{kind}")
            for kind in kinds
        }
        targets: dict[Kind, str] = {kind: name for kind, name in named.items() if name is not None}
        return cls(targets, hidden=hidden, threads=config.learner.threads)

    def load(self, kind: Kind, target: str) -> "CustomFunction":
        """Import a function in place of an earlier one of its kind. Raises ConfigError."""
        self._functions[kind] = function = CustomFunction(kind, target, self)
        return function

    def get(self, kind: Kind, target: str | None) -> "CustomFunction | None":
        """Return the function that a key names; None if the key is empty."""
        return None if target is None else self._functions[kind]

    def close(self) -> None:
        """End the process; may be repeated."""
        if self._process is not None:
            self._connection.close()
            self._process.end()

    def request(
        self,
        function: "CustomFunction",
        message: Mapping[str, Any],
        arrays: Arrays,
        *,
        result_bytes: int = 0,
        call_s: float | None = None,
    ) -> tuple[dict[str, Any], Arrays]:
        """Send one request of a function and return the answer, whose contents are unchecked.

        `result_bytes` bounds the arrays of the answer. The process is killed if it is late or its
        answer is invalid. Raises ConfigError, naming the function, and torch.OutOfMemoryError, on
        which a step is repeated in smaller micro-batches.
        """
        assert self._process is not None
        call_s = call_s or self._call_s
        with self._lock:
            deadline = time.monotonic() + call_s
            try:
                send(self._connection, message, arrays, deadline)
                answer, results = receive(
                    self._connection,
                    max_array_bytes=result_bytes,
                    max_head_bytes=_MAX_HEAD_BYTES,
                    deadline=deadline,
                )
            except TimeoutError:
                self._process.end()
                raise function.wrong(f"did not return within {call_s:g} s") from None
            except (EOFError, OSError):
                raise function.wrong(
                    f"ended its process, which {self._process.end(_END_S)}",
                    "see the end of the learner's log",
                ) from None
            except MessageError as error:
                self._process.end()
                raise function.wrong(f"sent an invalid answer: {error.message}") from error
        if "out_of_memory" in answer:
            raise torch.OutOfMemoryError(clean_text(answer["out_of_memory"]))
        if "failed" in answer:
            raise function.wrong(clean_text(answer["failed"]), clean_text(answer.get("hint", "")))
        return answer, results


class CustomFunction:
    """One function of the user."""

    def __init__(self, kind: Kind, target: str, functions: OwnFunctions) -> None:
        """Let the process import the function; raises ConfigError with the import's error."""
        self.key = f"{'training' if kind == 'curriculum' else 'algorithm'}.own_{kind}={target}"
        self._kind: Kind = kind
        self._hint = _CHECK.format(target=target)
        self._functions = functions
        load = {"do": "load", "kind": kind, "target": target}
        functions.request(self, load, {}, call_s=_LOAD_S)

    def advantage(self, inputs: AdvantageInputs) -> Tensor:
        """Return float32[N], the advantage of each token. Raises ConfigError."""
        return self._vector(inputs, inputs.seq_N, "advantages").float()

    def loss(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, with gradient, and no statistics. Raises ConfigError."""
        tensors = {name: value for name, value in vars(inputs).items() if torch.is_tensor(value)}
        derived = [name for name, value in tensors.items() if value.requires_grad]
        if not torch.is_grad_enabled():
            derived = []
        apply = cast("Any", _OwnLoss.apply)
        return apply(self, inputs, derived, *(tensors[name] for name in derived)), {}

    def correction(self, inputs: CorrectionInputs) -> Correction:
        """Return the weight of each token, 0 to drop it. Raises ConfigError."""
        weight_N = self._vector(inputs, inputs.seq_N, "weights")
        if bool((weight_N < 0).any()):
            raise self.wrong(f"returned a negative weight: {float(weight_N.min()):g}")
        return Correction(weight_N, inputs.old_logprobs_N)

    def mask(self, inputs: CorrectionInputs) -> Tensor:
        """Return whether each token is trained: float32[N] of 0 and 1. Raises ConfigError."""
        kept_N = self._vector(inputs, inputs.seq_N, "marks", may_be_bool=True)
        if not bool(((kept_N == 0) | (kept_N == 1)).all()):
            raise self.wrong("returned marks that are neither 0 nor 1", "return a bool tensor")
        return kept_N

    def decision(self, inputs: FilterInputs) -> bool:
        """Return whether a group is trained. Raises ConfigError."""
        answer, _ = self._called(inputs)
        decision = answer.get("decision")
        if not isinstance(decision, bool):
            raise self.wrong(
                f"returned {clean_text(answer.get('shown', 'nothing'))} in place of True, to train "
                "the group, or False"
            )
        return decision

    def weights(self, inputs: CurriculumInputs) -> NDArray[np.float64]:
        """Return float64[I], the weight of each task. Raises ConfigError."""
        num = len(inputs.tries_I)
        answer, results = self._called(inputs, num * _NUMBER_BYTES)
        weights_I = results.get("result")
        if weights_I is None or weights_I.shape != (num,) or weights_I.dtype != np.float64:
            raise self.wrong(
                f"returned weights of shape {clean_text(answer.get('shape'))} for {num} tasks"
            )
        if not np.isfinite(weights_I).all() or (weights_I < 0).any():
            raise self.wrong("returned weights that are negative, NaN or infinite")
        return weights_I

    def loss_values(self, inputs: LossInputs, derived: list[str]) -> Tensor:
        """Return the loss of each token, without gradient. Raises ConfigError."""
        answer, results = self._called(inputs, _bytes_of(inputs.seq_N), derived)
        loss_N = self._checked(answer, results, inputs.seq_N, "losses")
        if derived and len(loss_N) and answer.get("has_gradient") is not True:
            raise self.wrong(
                "returned losses without a gradient: nothing would be learnt",
                "compute them from inputs.logprobs_N, without detach() or item()",
            )
        return loss_N

    def derivatives(self, grad_N: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        """Return the last loss's derivative by each input, weighted by `grad_N`.

        Like a derivative that is computed here it may be NaN, and the update is then skipped.
        Raises ConfigError.
        """
        if not len(grad_N):
            return [torch.zeros_like(tensor) for tensor in inputs]
        num_bytes = sum(tensor.numel() * _NUMBER_BYTES for tensor in inputs)
        arrays = {"grad_N": to_array(grad_N)}
        _, results = self._functions.request(self, {"do": "derive"}, arrays, result_bytes=num_bytes)
        grads: list[Tensor] = []
        for place, tensor in enumerate(inputs):
            array = results.get(str(place))
            if array is None or array.shape != tensor.shape or array.dtype.kind != "f":
                raise self.wrong("has a derivative of the wrong shape or dtype")
            grads.append(to_tensor(array).to(tensor))
        return grads

    def _called(
        self, inputs: Any, result_bytes: int = 0, derived: list[str] | None = None
    ) -> tuple[dict[str, Any], Arrays]:
        values, arrays = split_inputs(inputs)
        message = {"do": "call", "kind": self._kind, "values": values, "derived": derived or []}
        return self._functions.request(self, message, arrays, result_bytes=result_bytes)

    def _vector(
        self, inputs: Any, seq_N: Tensor, what: str, *, may_be_bool: bool = False
    ) -> Tensor:
        answer, results = self._called(inputs, _bytes_of(seq_N))
        return self._checked(answer, results, seq_N, what, may_be_bool=may_be_bool)

    def _checked(
        self,
        answer: Mapping[str, Any],
        results: Arrays,
        seq_N: Tensor,
        what: str,
        *,
        may_be_bool: bool = False,
    ) -> Tensor:
        """Return the result, one finite number for each token, on the device of the inputs."""
        num, of_type = len(seq_N), clean_text(answer.get("type", "nothing"))
        if "shape" not in answer:
            raise self.wrong(f"returned a {of_type} in place of a tensor of {what}")
        array = results.get("result")
        if answer["shape"] != [num] or (array is not None and array.shape != (num,)):
            raise self.wrong(
                f"returned {what} of shape {clean_text(answer['shape'])} for {num} tokens",
                f"return one value for each token: shape [{num}]",
            )
        if array is None or array.dtype.kind not in ("fb" if may_be_bool else "f"):
            raise self.wrong(f"returned {what} of {of_type}, which are not real numbers")
        value_N = to_tensor(array).to(seq_N.device)
        if value_N.dtype == torch.bool:
            return value_N.float()
        if not bool(torch.isfinite(value_N).all()):
            count = int((~torch.isfinite(value_N)).sum())
            raise self.wrong(f"returned {count} {what} of {num} that are NaN or infinite")
        return value_N

    def wrong(self, what: str, hint: str = "") -> ConfigError:
        """Return the ConfigError for an unusable result."""
        return ConfigError(f"{self.key} {what}", hint="; ".join(filter(None, (hint, self._hint))))


class _OwnLoss(torch.autograd.Function):
    """A loss whose values and derivatives another process computes.

    That process keeps the graph of the last loss only, so a loss is derived before the next one is
    computed.
    """

    @staticmethod
    def forward(
        ctx: Any, function: CustomFunction, inputs: LossInputs, derived: list[str], *tensors: Tensor
    ) -> Tensor:
        """Return loss_N."""
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function.loss_values(inputs, derived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the derivatives by the tensors."""
        (grad_N,) = grads
        return None, None, None, *ctx.function.derivatives(grad_N, list(ctx.saved_tensors))


def _bytes_of(seq_N: Tensor) -> int:
    return len(seq_N) * _NUMBER_BYTES
