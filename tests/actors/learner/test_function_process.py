"""The process of a user's functions: the bits of its results, and how a hostile one ends."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.training.functions.calls import OwnFunctions
from tinkermq.actors.training.functions.wire import Kind
from tinkermq.actors.training.losses import LossInputs
from tinkermq.actors.training.off_policy import CorrectionInputs
from tinkermq.envs.sandbox.shown import PathRefused
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.functions import sandboxed

HERE = "tests.actors.learner.test_function_process"
NUM = 1003
"""Tokens: not a multiple of what a vector instruction holds."""


def inputs(*, requires_grad: bool = True) -> LossInputs:
    """Return the inputs of a loss."""
    generator = torch.Generator().manual_seed(1)
    old_N, moved_N, advantages_N = torch.randn(3, NUM, generator=generator)
    return LossInputs(
        logprobs_N=(old_N + 0.3 * moved_N).requires_grad_(requires_grad),
        advantages_N=advantages_N,
        old_logprobs_N=old_N,
        behaviour_logprobs_N=old_N + 0.01,
        seq_N=torch.arange(NUM) // 100,
        num_seqs=NUM // 100 + 1,
    )


def clipped(inputs: Any) -> torch.Tensor:
    """PPO, and a part that sums over a sequence."""
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).exp()
    sums_S = torch.zeros(inputs.num_seqs).index_add(0, inputs.seq_N, inputs.logprobs_N)
    bounded_N = ratio_N.clamp(0.8, 1.28) * inputs.advantages_N
    return -torch.minimum(ratio_N * inputs.advantages_N, bounded_N) + sums_S[inputs.seq_N].tanh()


def in_double(inputs: Any) -> torch.Tensor:
    """A loss in float64."""
    return clipped(inputs).double() ** 2


def hangs(inputs: Any) -> Any:
    """Never return."""
    time.sleep(3600)


def dies(inputs: Any) -> Any:
    """End the process."""
    os.kill(os.getpid(), signal.SIGKILL)


def exits(inputs: Any) -> Any:
    """End the process by the side door."""
    os._exit(0)


def _connection() -> int:
    """Return the descriptor of the learner's socket."""
    for held in Path("/proc/self/fd").iterdir():
        if str(held.readlink()).startswith("socket:"):
            return int(held.name)
    raise AssertionError("there is no socket")


def _says(head: bytes, length: int | None = None) -> None:
    given = len(head) if length is None else length
    os.write(_connection(), given.to_bytes(4, "little") + head)
    time.sleep(3600)


def says_much(inputs: Any) -> Any:
    """Announce an answer of four gigabytes."""
    _says(b"", (1 << 32) - 1)


def says_nonsense(inputs: Any) -> Any:
    """Send an answer that is no msgpack."""
    _says(b"\xc1" * 64)


def says_no_map(inputs: Any) -> Any:
    """Send an answer of another form."""
    from tinkermq.schemas.wire.codec import pack

    _says(pack([1, 2, 3]))


def _forges(*array: Any) -> None:
    from tinkermq.schemas.wire.codec import pack

    _says(pack({"message": {"shape": [NUM], "type": "torch.float32"}, "arrays": [list(array)]}))


def says_large_array(inputs: Any) -> Any:
    """Announce a result of a terabyte."""
    _forges("result", "<f8", [1 << 37])


def says_objects(inputs: Any) -> Any:
    """Announce a result of Python objects."""
    _forges("result", "|O", [NUM])


def says_negative(inputs: Any) -> Any:
    """Announce a result of a negative size."""
    _forges("result", "<f4", [-1])


def says_half(inputs: Any) -> Any:
    """Send half of a length."""
    os.write(_connection(), b"\x01\x02")
    os._exit(0)


def says_fewer(inputs: Any) -> Any:
    """Send a whole answer with a result of another shape than it says."""
    from tinkermq.schemas.wire.codec import pack

    said = {"shape": [NUM], "type": "torch.float32", "has_gradient": True}
    head = pack({"message": said, "arrays": [["result", "<f4", [1]]]})
    os.write(_connection(), len(head).to_bytes(4, "little") + head + bytes(4))
    time.sleep(3600)


@pytest.fixture(scope="module")
def own() -> Iterator[OwnFunctions]:
    """A process of functions, which takes seconds to start."""
    with closing(OwnFunctions({"loss": f"{HERE}:clipped"})) as functions:
        yield functions


@pytest.mark.parametrize("name", ["clipped", "in_double"])
def test_a_loss_and_its_derivative_have_the_bits_of_autograd(name: str, own: OwnFunctions) -> None:
    here, there = inputs(), inputs()
    weights_N = torch.randn(NUM, generator=torch.Generator().manual_seed(2))
    expected_N = globals()[name](here)
    (expected_N * weights_N).sum().backward()
    loss_N, statistics = own.load("loss", f"{HERE}:{name}").loss(there)
    assert loss_N.requires_grad
    (loss_N * weights_N).sum().backward()
    assert (statistics, loss_N.dtype) == ({}, expected_N.dtype)
    assert torch.equal(loss_N, expected_N)
    assert here.logprobs_N.grad is not None
    assert there.logprobs_N.grad is not None
    assert torch.equal(there.logprobs_N.grad, here.logprobs_N.grad)


def test_a_loss_without_gradients_is_computed_alone(own: OwnFunctions) -> None:
    loss = own.load("loss", f"{HERE}:clipped")
    with torch.no_grad():
        measured_N, _ = loss.loss(inputs())
    assert not measured_N.requires_grad
    assert torch.equal(measured_N, clipped(inputs(requires_grad=False)))


def test_a_loss_is_derived_before_the_next_one_is_computed(own: OwnFunctions) -> None:
    loss = own.load("loss", f"{HERE}:clipped")
    first_N, _ = loss.loss(inputs())
    loss.loss(inputs())[0].sum().backward()
    with pytest.raises(ConfigError, match="has no loss to derive"):
        first_N.sum().backward()


ENDS = [
    ("exits", "own_loss=.*:exits ended its process, which exited with code 0"),
    ("dies", "own_loss=.*:dies ended its process, which exited with code -9"),
    ("hangs", "own_loss=.*:hangs did not return within 1 s"),
    ("says_half", "own_loss=.*:says_half ended its process"),
    ("says_much", "sent an invalid answer: a message of 4,294,967,295 bytes, more than"),
    ("says_nonsense", "sent an invalid answer: the payload is not valid msgpack"),
    ("says_no_map", "sent an invalid answer: a message without its map"),
    ("says_large_array", "sent an invalid answer: arrays of more bytes than the inputs allow"),
    ("says_objects", "sent an invalid answer: an array whose name, dtype or shape"),
    ("says_negative", "sent an invalid answer: an array whose name, dtype or shape"),
    ("says_fewer", rf"returned losses of shape \[{NUM}\] for {NUM} tokens"),
]


@pytest.mark.parametrize(
    ("name", "words"), [ENDS[0], *(pytest.param(*end, marks=pytest.mark.full) for end in ENDS[1:])]
)
def test_a_process_that_ends_hangs_or_lies_is_told_by_the_functions_name(
    name: str, words: str
) -> None:
    target = f"{HERE}:{name}"
    with closing(OwnFunctions({"loss": target}, call_s=1)) as functions:
        loss = functions.get("loss", target)
        assert loss is not None
        with pytest.raises(ConfigError, match=words) as raised:
            loss.loss(inputs())
        assert f"algorithm check {target}" in raised.value.hint
        if name != "says_fewer":  # which still answers
            with pytest.raises(ConfigError, match="ended its process"):
                loss.loss(inputs())


BOMBS = """
import os, time, torch

def memory(inputs):
    held = []
    while True:
        held.append(torch.ones(1 << 24))

def processes(inputs):
    children = []
    try:
        for _ in range(10_000):
            child = os.fork()
            if not child:
                time.sleep(3600)
            children.append(child)
    except OSError as error:
        raise ValueError(f"{len(children)} processes") from error

def files(inputs):
    with open("/tmp/large", "wb") as file:
        for _ in range(1024):
            file.write(bytes(1 << 20))
            file.flush()
"""
BOMBED: list[tuple[Kind, str, str]] = [
    ("mask", "memory", r"own_mask=mine:memory (ended its process|.*held more than memory_mb=4096)"),
    ("mask", "processes", r"raised ValueError: \d\d\d? processes"),
    ("mask", "files", "raised OSError: "),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name", "words"), BOMBED, ids=[one[1] for one in BOMBED])
def test_a_sandboxed_function_has_bounds(kind: Kind, name: str, words: str, tmp_path: Path) -> None:
    zeros = torch.zeros(4)
    read = CorrectionInputs(zeros, zeros, zeros.long(), 1)
    with sandboxed(tmp_path, BOMBS, kind, name) as functions:
        mask = functions.get(kind, f"mine:{name}")
        assert mask is not None
        with pytest.raises(ConfigError, match=words):
            mask.mask(read)


@pytest.mark.full
def test_functions_that_would_see_the_runs_of_all_do_not_start(tmp_path: Path) -> None:
    (tmp_path / "games/runs/ada/r").mkdir(parents=True)
    with (
        pytest.raises(PathRefused, match="would see the run folders of all users"),
        sandboxed(tmp_path, BOMBS, "mask", "memory", run="games/runs/ada/r"),
    ):
        pass
