"""The quick checks of `tinkermq doctor --gpu`, bfloat16, and sums over processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.gpu_check import CHECKS, GpuCheck, run_check, sum_over_ranks
from tinkermq.actors.policy.devices import own_device
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.schemas.node import NodeList
from tinkermq.schemas.wire.message import Empty

from benchmarks.learner_step import matrix_rate
from tests.gpu.material import RandomPolicy, token_sequences
from tests.gpu.report import Recorder
from tests.support.stack import Stack

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_quick_check_holds(check: GpuCheck, on_gpu: bool, record: Recorder) -> None:
    result = run_check(check)
    record(check.name, result.detail)
    if result.outcome == "skipped":
        pytest.skip(result.detail)
    if check.name == "device" and not on_gpu:
        assert result.outcome == "failed"
        assert "no GPU" in result.detail or "built for the CPU" in result.detail
        return
    assert result.outcome == "ok", result


@pytest.mark.parametrize(("option", "hides_gpus"), [("--slots", True), ("--cpu-slots", False)])
async def test_a_node_gives_away_cpu_shares_where_it_has_or_shows_no_gpu(
    option: str, hides_gpus: bool, on_gpu: bool, tmp_path: Path
) -> None:
    async with Stack(tmp_path / "stack", node_options=[option, "3"]) as stack:
        (status,) = (await stack.ask("nodes", Empty(), NodeList)).nodes
    gpus = torch.cuda.device_count() if on_gpu and not hides_gpus else 0
    assert len(status.gpus) == gpus
    assert (status.slot_kind, status.slots) == (("gpu", gpus) if gpus else ("cpu", 3))


def test_products_in_bfloat16_are_exact_enough_and_faster_than_in_float32(
    on_gpu: bool, record: Recorder
) -> None:
    left, right = (torch.randn(512, 512, device=own_device(), dtype=torch.float64) for _ in "ab")
    exact = left @ right
    rounded = (left.bfloat16() @ right.bfloat16()).double()
    assert float((rounded - exact).norm() / exact.norm()) <= 0.01
    size = 8192 if on_gpu else 256
    rates = {dtype: matrix_rate(dtype, size) for dtype in ("bfloat16", "float32")}
    record("bfloat16 product, TFLOP/s", rates["bfloat16"] / 1e12)
    record("over float32", rates["bfloat16"] / rates["float32"])
    if on_gpu:
        assert rates["bfloat16"] >= 2 * rates["float32"]


def test_two_processes_sum_in_the_memory_of_the_machine(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, record: Recorder
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # each would want a GPU of its own
    num_values = 1 << (24 if on_gpu else 16)
    seconds = sum_over_ranks(2, num_values)
    record("gloo, GB/s", 4 * num_values / seconds / 1e9)


@pytest.mark.parametrize("share", [False, True])
def test_the_learner_scores_packed_sequences_alike_with_varlen_attention(
    policy: RandomPolicy, share: bool, record: Recorder
) -> None:
    sequences = token_sequences(policy.vocab_size, [300, 40, 211])
    prompt = 300 // 8
    of_same_prompt = np.concatenate([sequences[0].token_ids[:prompt], sequences[2].token_ids])
    mask = np.arange(len(of_same_prompt)) >= prompt
    sequences.append(TokenSequence(of_same_prompt, mask.astype(np.uint8)))
    varlen_N = policy.learner("varlen").logprobs(sequences, share_prompts=share)
    difference = float((varlen_N - policy.learner("sdpa").logprobs(sequences)).abs().mean())
    record("mean difference of log-probs", difference)
    assert difference <= 0.02


def test_the_learner_scores_packed_sequences_alike_with_flash_attention(
    policy: RandomPolicy, on_gpu: bool, record: Recorder
) -> None:
    if not on_gpu:
        pytest.skip("flash-attention's kernels run on GPUs only")
    pytest.importorskip(
        "flash_attn", reason="pip install --no-build-isolation 'tinkermq[flash-attn]'"
    )
    sequences = token_sequences(policy.vocab_size, [300, 40, 211])
    flash_N = policy.learner("flash_attention_2").logprobs(sequences)
    difference = float((flash_N - policy.learner("sdpa").logprobs(sequences)).abs().mean())
    record("mean difference of log-probs", difference)
    assert difference <= 0.02
