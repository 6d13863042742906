"""Checkpoints are whole or absent, load as model folders, and continue bit for bit."""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.training.checkpoint import load_state
from tinkermq.actors.training.state import LearnerState, Waste
from tinkermq.actors.training.step import Trainer
from tinkermq.broker.feed import ValidationScore, best_of
from tinkermq.schemas.wire.errors import NotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from tests.support import disks
from tests.support.saving import (
    fork_context,
    make_store,
    make_trainer,
    save,
    save_in_a_loop,
    save_on_a_full_disk,
    train,
)
from tests.support.variants import variants
from tests.support.waiting import PATIENCE_S


def _bits(trainer: Trainer) -> list[bytes]:
    return [value.numpy().tobytes() for value in trainer.model.state_dict().values()]


def test_training_goes_on_bit_for_bit_from_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    first = make_trainer(folder)
    train(first, range(1, 4))
    saved = save(make_store(tmp_path), first, folder, 3)
    again = make_trainer(folder, saved)
    before, after = first.optimizer.state_dict(), again.optimizer.state_dict()
    for index, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after["state"][index][name]), name
    assert before["param_groups"] == after["param_groups"]
    for trainer in (first, again):
        train(trainer, range(4, 7))
    assert _bits(again) == _bits(first)


def test_weights_that_are_not_trained_keep_every_bit_in_a_run_that_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    config = Ernie4_5_MoeConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
    )
    torch.manual_seed(0)
    Ernie4_5_MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    load_tokenizer(str(folder)).save_pretrained(tmp_path / "model")
    first = make_trainer(tmp_path / "model")
    for step in range(1, 3):
        train(first, range(step, step + 1))
        saved = save(make_store(tmp_path / "run"), first, folder, step)
        again = make_trainer(tmp_path / "model", saved)
        for trainer in (first, again):
            train(trainer, range(9, 10))
        assert _bits(again) == _bits(first)
    unused = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
    weight = first.model.get_parameter(unused)
    assert not weight.requires_grad
    assert torch.equal(weight, make_trainer(tmp_path / "model").model.get_parameter(unused))


def test_a_checkpoint_is_a_model_folder(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    saved = save(make_store(tmp_path), trainer, folder, 1)
    model = AutoModelForCausalLM.from_pretrained(saved)
    trained = trainer.model.get_parameter("lm_head.weight")
    assert torch.equal(model.lm_head.weight, trained)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer("1+2=")["input_ids"] == load_tokenizer(str(folder))("1+2=")["input_ids"]
    assert tokenizer.chat_template
    assert (tmp_path / "latest").resolve() == saved


def test_whoever_may_read_a_checkpoint_may_read_its_weights(folder: Path, tmp_path: Path) -> None:
    saved = save(make_store(tmp_path), make_trainer(folder), folder, 1)
    modes = {path.stat().st_mode & 0o777 for path in saved.rglob("*") if path.is_file()}
    assert modes == {saved.stat().st_mode & 0o666}


def test_the_state_comes_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    state = LearnerState(
        step=5,
        total_steps=9,
        batch_seq=7,
        log_seq=12,
        next_task=80,
        next_index=78,
        trained=[(0, 40), (42, 60)],
        dropped=[(40, 42)],
        indices=[(0, 57)],
        owed=[(41, 39)],
        waste=Waste(tokens_generated=9, tokens_finished=8, tokens_trained=5),
    )
    trainer = make_trainer(folder)
    tokenizer = load_tokenizer(str(folder))
    saved = make_store(tmp_path).save(state, lambda made: trainer.save(made, tokenizer))
    assert load_state(saved) == state


def test_the_newest_and_every_so_many_are_kept(folder: Path, tmp_path: Path) -> None:
    store, trainer = make_store(tmp_path, keep_every=3), make_trainer(folder)
    assert store.latest() is None
    for step in range(1, 9):
        save(store, trainer, folder, step)
    assert store.steps() == [3, 6, 7, 8]
    assert store.latest() == store.path(8)
    assert (tmp_path / "latest").resolve() == store.path(8)
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["step_000003", "step_000006", "step_000007", "step_000008"]


def whole(mean: float) -> ValidationScore:
    """Return the score of a validation that lacks no episode."""
    return ValidationScore(mean, worst=0.0, num_episodes=4, num_missing=0)


class Scores:
    """What is known of versions, as the evaluations of a run tell it."""

    def __init__(self, **scores: float) -> None:
        self.known = {int(name.removeprefix("v")): whole(score) for name, score in scores.items()}
        self.waiting: set[int] = set()

    def best(self, steps: Sequence[int]) -> int | None:
        """Return the best of these."""
        return best_of(self.known, steps)

    def spared(self, steps: Sequence[int]) -> set[int]:
        """Return the best and those whose score is waited for."""
        best = self.best(steps)
        return self.waiting | ({best} if best is not None else set())


def test_the_best_stays_and_so_does_what_may_become_it(folder: Path, tmp_path: Path) -> None:
    store, trainer = make_store(tmp_path), make_trainer(folder)
    store.judged = scores = Scores(v1=0.5, v2=0.9, v3=float("nan"), v4=0.9)
    scores.waiting = {1}
    for step in range(1, 7):
        save(store, trainer, folder, step)
    assert store.steps() == [1, 2, 5, 6]  # of equals the earliest
    assert (tmp_path / "best").resolve() == store.path(2)
    scores.waiting, scores.known[6] = set(), whole(1.0)
    store.remove_old()
    assert store.steps() == [5, 6]
    assert (tmp_path / "best").resolve() == store.path(6)


def test_saving_a_step_again_replaces_it(folder: Path, tmp_path: Path) -> None:
    store, trainer = make_store(tmp_path), make_trainer(folder)
    save(store, trainer, folder, 1)
    train(trainer, range(1, 2))
    saved = save(store, trainer, folder, 1)
    assert _bits(make_trainer(folder, saved)) == _bits(trainer)


def test_the_replaced_checkpoint_counts_until_the_new_one_is_in_place(
    folder: Path, tmp_path: Path
) -> None:
    store, trainer = make_store(tmp_path), make_trainer(folder)
    saved = save(store, trainer, folder, 1)
    saved.rename(saved.with_name(f".replaced_{saved.name}"))  # as a crash between the two renames
    assert store.steps() == [1]
    latest = store.latest()
    assert latest is not None
    assert load_state(latest).step == 1
    assert save(store, trainer, folder, 1) == saved
    assert [path.name for path in store.folder.iterdir()] == [saved.name]


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a checkpoint of a learner") as raised:
        load_state(tmp_path)
    assert "outputs/<run>/checkpoints/step_000040" in raised.value.hint


@pytest.mark.full
def test_killed_while_saving_the_newest_whole_checkpoint_loads(
    folder: Path, tmp_path: Path
) -> None:
    rng, context, store = random.Random(1), fork_context(), make_store(tmp_path)
    newest = 0
    for _ in range(12):
        listen, told = context.Pipe(duplex=False)
        child = context.Process(target=save_in_a_loop, args=(folder, tmp_path, told))
        child.start()
        told.close()
        confirmed = newest
        for _ in range(rng.randrange(1, 3)):
            assert listen.poll(PATIENCE_S)
            confirmed = listen.recv()
        time.sleep(rng.uniform(0, 0.1))
        child.kill()
        child.join()
        latest = store.latest()
        assert latest is not None
        newest = load_state(latest).step
        assert newest >= confirmed
        make_trainer(folder, latest)


def _message_of_a_full_disk(folder: Path, run: Path, *, limit: int = 0, left: int = 0) -> str:
    context = fork_context()
    listen, told = context.Pipe(duplex=False)
    child = context.Process(target=save_on_a_full_disk, args=(folder, run, told, limit, left))
    child.start()
    told.close()
    assert listen.poll(60)
    message = listen.recv()
    child.join()
    return message


def _assert_first_is_whole(folder: Path, run: Path) -> None:
    store = make_store(run)
    assert store.steps() == [1]
    assert [path.name for path in store.folder.iterdir()] == ["step_000001"]
    assert (run / "latest").resolve() == store.path(1)
    make_trainer(folder, store.path(1))


# The weights are too long for the first limit, the optimiser's state for the second.
@pytest.mark.parametrize("limit", variants([50_000, 600_000], 600_000))
def test_a_file_that_cannot_be_written_leaves_earlier_checkpoints_whole(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    said = _message_of_a_full_disk(folder, tmp_path, limit=limit)
    assert "checkpoints/step_000002 could not be written:" in said
    assert "MiB free)" in said
    assert "earlier checkpoints are whole and training goes on" in said
    _assert_first_is_whole(folder, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with disks.small_disk(tmp_path / "disk", 4) as place:
        yield place


@pytest.mark.parametrize("left", variants([8_192, 200_000, 700_000], 200_000))
def test_a_full_disk_is_named_and_leaves_earlier_checkpoints_whole(
    folder: Path, small_disk: Path, left: int
) -> None:
    said = _message_of_a_full_disk(folder, small_disk, left=left)
    assert "checkpoints/step_000002 could not be written: the disk is full (" in said
    assert "free some space; earlier checkpoints are whole and training goes on" in said
    _assert_first_is_whole(folder, small_disk)
