"""What a trainer keeps of its users."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pyrage import decrypt, x25519  # pyright: ignore[reportMissingModuleSource]
from safetensors.torch import load_file
from tinkermq.actors.storage.tinker_checkpoints import CheckpointFolders, StoredCheckpoint
from tinkermq.actors.tinker.adapter_cache import AdapterStates
from tinkermq.actors.tinker.catalogue import Catalogue, SaveOptions
from tinkermq.actors.tinker.exports import Exports
from tinkermq.actors.tinker.models import TrainedModel
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.config.sections import ADAPTER_FILES
from tinkermq.schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    FetchFile,
    ListCheckpoints,
    ListRuns,
    ListSessions,
    TellSession,
    TinkerCheckpoint,
)
from tinkermq.schemas.tinker.datum import LoraSpec
from tinkermq.schemas.tinker.names import CheckpointKind, CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import ModelInfo
from tinkermq.schemas.wire.errors import (
    AuthError,
    ConfigError,
    ConflictError,
    ModelError,
    NotFoundError,
    QuotaError,
    StateError,
    StorageError,
)

from tests.support.disks import fill, small_disk
from tests.support.models import make_tiny_model
from tests.support.tinker import BASE, open_trainer

torch.set_num_threads(1)
ADAS = ModelName("s1", 0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterTrainer:
    trainer = open_trainer(make_tiny_model(tmp_path_factory.mktemp("kept") / "base"))
    trainer.create(f"ada/{ADAS}", LoraSpec(rank=2, seed=1))
    return trainer


class Kept:
    """What a trainer keeps, with one model of ada's."""

    def __init__(self, folder: Path, adapters: AdapterTrainer, max_bytes: int = 1 << 30) -> None:
        self.folder, self.adapters = folder, adapters
        self.catalogue = Catalogue(folder, max_bytes=max_bytes)
        self.catalogue.load()
        self.folders = CheckpointFolders(folder)
        info = ModelInfo(model=str(ADAS), base=BASE, folder="f", arch="qwen3", rank=2)
        self.model = TrainedModel("ada", ADAS, info=info)

    def save(
        self, name: str, seq: int, kind: CheckpointKind = "weights", **told: Any
    ) -> StoredCheckpoint:
        named = CheckpointName(ADAS, kind, name)
        options = SaveOptions(**told)
        return self.catalogue.save(self.adapters, self.model, named, seq, options)

    def change(self, path: str, action: Any, user: str = "ada", **more: Any) -> TinkerCheckpoint:
        wanted = more.pop("wanted", False)
        asked = ChangeCheckpoint(path=path, action=action, **more)
        return self.catalogue.change(user, asked, is_wanted=lambda _: wanted)

    def listed(self, user: str = "ada", **asked: Any) -> list[str]:
        page = self.catalogue.list_checkpoints(user, ListCheckpoints(**asked))
        return [one.path.rpartition("/")[2] for one in page.checkpoints]

    def found(self, stored: StoredCheckpoint, user: str = "ada") -> StoredCheckpoint:
        return self.folders.find(user, stored.name)


@pytest.fixture
def kept(tmp_path: Path, adapters: AdapterTrainer) -> Kept:
    return Kept(tmp_path, adapters)


def test_a_save_done_again_changes_nothing_and_a_name_is_given_once(kept: Kept) -> None:
    first = kept.save("a", 3, user_metadata={"who": "me"})
    assert kept.save("a", 3) == first
    with pytest.raises(StateError, match="there is a checkpoint tinker://s1:train:0/weights/a al"):
        kept.save("a", 5)
    second = kept.save("a", 5, overwrite=True)
    assert second.folder != first.folder  # who had read the first knows the second from it
    assert not first.folder.exists()
    assert kept.save("a", 3) == second
    assert load_file(second.folder / "adapter_model.safetensors").keys()


def test_lists_have_pages_and_what_is_gone_is_known_after_a_restart(
    kept: Kept, adapters: AdapterTrainer
) -> None:
    saved = [kept.save(f"c{number}", number, time=100.0 + number) for number in range(4)]
    kept.save("passing-9", 9, "sampler_weights", passing=True)
    assert kept.listed() == ["c3", "c2", "c1", "c0"]
    assert kept.listed(offset=1, limit=2) == ["c2", "c1"]
    assert kept.listed("bob") == []
    kept.change(str(saved[0].name), "delete")
    kept.change(str(saved[1].name), "expire", ttl_s=1)
    kept.catalogue._commit(replace(saved[2], expires=200.0))
    (saved[3].place / "99").mkdir()  # what a save that was killed has left
    again = Kept(kept.folder, adapters)
    assert again.catalogue.sweep(is_wanted=lambda _: False) == 1
    for one, words in ((saved[0], "was deleted"), (saved[2], "has expired")):
        for some in (kept, again):
            with pytest.raises(NotFoundError, match=words):
                some.found(one)
        assert not one.folder.exists()
    assert again.listed() == ["c3", "c1"]
    assert not (saved[3].place / "99").exists()
    assert again.save("c0", 7).seq == 7


def test_who_owns_a_damaged_checkpoint_deletes_it_or_saves_over_it(
    kept: Kept, adapters: AdapterTrainer
) -> None:
    saved = [kept.save(name, seq) for seq, name in enumerate("ab", 1)]
    for one in saved:
        (one.place / "tinker.json").write_text("{", "utf-8")
    again = Kept(kept.folder, adapters)
    path = str(saved[0].name)
    for words in ("is damaged", "delete it, or save over it with overwrite"):
        with pytest.raises(ModelError, match=words):
            again.found(saved[0])
    with pytest.raises(NotFoundError):
        again.change(path, "delete", "bob")
    with pytest.raises(ConflictError, match="about to be loaded"):
        again.change(path, "delete", wanted=True)
    assert again.change(path, "delete").path == path
    assert not saved[0].place.exists()
    with pytest.raises(NotFoundError):
        again.change(path, "delete")
    with pytest.raises(ModelError, match="is damaged"):
        again.save("b", 5)
    assert again.found(again.save("b", 6, overwrite=True)).seq == 6
    assert again.listed() == ["b"]


@pytest.mark.parametrize("kind", ["state", "checkpoint"])
def test_what_a_full_disk_breaks_off_takes_no_room(
    tmp_path: Path, adapters: AdapterTrainer, kind: str
) -> None:
    with small_disk(tmp_path / "disk", 2) as disk:
        kept = Kept(disk / "states", adapters)
        states = AdapterStates(disk / "states")
        broken_off = disk / "states" / "ada" / "s1.train.0" / "state" / ".1"
        broken_off.mkdir(parents=True)
        (broken_off / "adapter_model.safetensors").write_bytes(bytes(4096))
        ballast, failures, is_written = fill(disk), 0, False
        while not is_written:
            free = shutil.disk_usage(disk).free
            try:
                if kind == "state":
                    states.save(adapters, kept.model)
                else:
                    kept.save("first", 1)
            except StorageError:
                failures += 1
                assert shutil.disk_usage(disk).free >= free
                os.truncate(ballast, ballast.stat().st_size - 4096)
            else:
                is_written = True
        assert failures > 3
        assert broken_off.exists() == (kind == "checkpoint")


def test_what_is_published_is_read_by_others_and_changed_by_nobody_else(kept: Kept) -> None:
    stored = kept.save("a", 1)
    path = str(stored.name)
    with pytest.raises(NotFoundError, match="belongs to another user and is not published"):
        kept.found(stored, "bob")
    kept.change(path, "publish")
    assert kept.found(stored, "bob").folder == stored.folder
    assert kept.listed("bob") == []
    for action in ("delete", "unpublish", "expire"):
        with pytest.raises(NotFoundError, match="there is no checkpoint"):
            kept.change(path, action, "bob")
    kept.change(path, "unpublish")
    with pytest.raises(NotFoundError):
        kept.found(stored, "bob")
    with pytest.raises(ConflictError, match="is about to be loaded"):
        kept.change(path, "delete", wanted=True)


def test_a_user_has_so_many_bytes_and_what_is_for_a_while_goes_first(
    tmp_path: Path, adapters: AdapterTrainer
) -> None:
    size = Kept(tmp_path / "one", adapters).save("a", 1).size_bytes
    kept = Kept(tmp_path / "two", adapters, max_bytes=3 * size)
    passing = kept.save("passing-1", 1, "sampler_weights", passing=True)
    kept.save("a", 2)
    kept.save("b", 3)
    assert kept.found(passing)
    kept.save("c", 4)
    with pytest.raises(NotFoundError):
        kept.found(passing)
    with pytest.raises(QuotaError, match=r"over the limit of .*tinker\.checkpoint_mb"):
        kept.save("d", 5)
    assert kept.listed() == ["c", "b", "a"]
    kept.change(f"tinker://{ADAS}/weights/a", "delete")
    kept.save("d", 6)


def test_a_ticket_opens_the_files_of_one_checkpoint_and_no_more(kept: Kept) -> None:
    secret = kept.folder / ".tickets"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes(b"")  # as a power cut may leave it
    exports = Exports(kept.folder, kept.folders)
    stored = kept.save("a", 1)
    export = exports.export("ada", str(stored.name))
    assert secret.stat().st_size == 32
    assert [one.name for one in export.files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    part = exports.fetch(FetchFile(ticket=export.ticket, file="adapter_config.json"))
    assert json.loads(part.data)["base_model_name_or_path"] == BASE
    weights = FetchFile(ticket=export.ticket, file="adapter_model.safetensors", offset=8)
    assert exports.fetch(weights).data == (stored.folder / weights.file).read_bytes()[8:]
    for file in ("tinkermq.json", "../../tinker.json", "optimizer.safetensors"):
        with pytest.raises(NotFoundError, match="has no file"):
            exports.fetch(FetchFile(ticket=export.ticket, file=file))
    said, _, signature = export.ticket.partition(".")
    for ticket in (f"{said}.{signature[::-1]}", f"x{said}.{signature}", "", ".", "é.é"):
        with pytest.raises(AuthError, match="is not a URL of a checkpoint"):
            exports.fetch(FetchFile(ticket=ticket, file="adapter_config.json"))
    with pytest.raises(NotFoundError):
        exports.export("bob", str(stored.name))


def test_an_export_can_be_encrypted_for_an_age_key(kept: Kept) -> None:
    identity = x25519.Identity.generate()
    recipient = str(identity.to_public())
    plain = kept.save("plain", 1, "external_weights")
    stored = kept.save("out", 2, "external_weights", recipients=[recipient])
    assert sorted(one.name for one in plain.folder.iterdir()) == list(ADAPTER_FILES)
    assert sorted(one.name for one in stored.folder.iterdir()) == [
        f"{name}.age" for name in ADAPTER_FILES
    ]
    for name in ADAPTER_FILES:
        sealed = (stored.folder / f"{name}.age").read_bytes()
        assert decrypt(sealed, [identity]) == (plain.folder / name).read_bytes()
    other_end = "p" if recipient.endswith("q") else "q"
    for wrong in (recipient[:-1] + other_end, "ssh-ed25519 AAAA", recipient[:-1], "age1"):
        with pytest.raises(ConfigError, match="is not an age recipient"):
            kept.save("wrong", 3, "external_weights", recipients=[wrong])


def test_sessions_and_runs_are_their_users_and_outlast_a_restart(
    kept: Kept, adapters: AdapterTrainer
) -> None:
    catalogue = kept.catalogue
    begin = TellSession(session="s1", event="begin", user_metadata={"a": "b"})
    assert catalogue.record_event("ada", begin).state == "live"
    assert kept.model.info is not None
    catalogue.begin_run("ada", kept.model.info, {"renderer_name": "x"}, 5.0)
    catalogue.record_event(
        "ada", TellSession(session="s1", event="sampler", sampler="s1:sample:0:x")
    )
    for told in (begin, TellSession(session="s1", event="finish", reason="mine")):
        with pytest.raises(NotFoundError, match="there is no session s1"):
            catalogue.record_event("bob", told)
    assert catalogue.record_event("bob", TellSession(session="s2", event="beat")).state == "unknown"
    finish = TellSession(session="s1", event="finish", reason="success")
    assert catalogue.record_event("ada", finish).state == "over"
    again = Kept(kept.folder, adapters).catalogue
    (found,) = again.list_sessions("ada", ListSessions()).sessions
    assert (found.models, found.reason) == ([str(ADAS)], "success")
    assert (found.user_metadata, found.samplers) == ({"a": "b"}, ["s1:sample:0:x"])
    assert again.list_sessions("bob", ListSessions(session="s1")).total == 0
    (run,) = again.list_runs("ada", ListRuns(), {ADAS: 7.0}).runs
    assert (run.model, run.time, run.user_metadata) == (str(ADAS), 7.0, {"renderer_name": "x"})
    assert again.list_runs("bob", ListRuns(), {}).total == 0
    with pytest.raises(NotFoundError):
        again.check_owner("bob", "s1")
