"""Folders in a store, through a network that fails, or in the broker."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tinkermq.actors.storage.access import refuse_other_stores
from tinkermq.actors.storage.adapters import base_of, name_bases_by_url
from tinkermq.actors.storage.cache import FolderCache, fetch_model
from tinkermq.actors.storage.checkpoints import (
    CheckpointMirror,
    own_folder,
)
from tinkermq.actors.storage.files import check_digests, link_tree, write_digests
from tinkermq.actors.storage.stores import BrokerStore, UrlStore, fetch_tree, upload_tree
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.wire.errors import (
    ConfigError,
    ModelError,
    StorageError,
    StoreAwayError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.support import disks
from tests.support.s3 import S3, SLOW_S, environment, s3_server
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

BIG = os.urandom((8 << 20) * 2 + 12345)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server, environment(server.environment):
        yield server


@pytest.fixture
def s3(server: S3) -> Iterator[S3]:
    server.faults.set("", 0)
    server.faults.requests.clear()
    yield server
    server.faults.set("", 0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "made")


def make_checkpoint(folder: Path, content: bytes = BIG) -> Path:
    (folder / "learner").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "learner" / "state.json").write_text("{}")
    (folder / "empty").write_bytes(b"")
    write_digests(folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def mirror_of(url: str, tries: int = 3, timeout_s: float = 60) -> CheckpointMirror:
    store = UrlStore(url, tries=tries, timeout_s=timeout_s)
    return CheckpointMirror(store, keep_last=2, keep_every=4)


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_what_was_uploaded_comes_back_and_the_newest_are_kept(
    s3: S3, tmp_path: Path, kind: str
) -> None:
    url = s3.url("kept") if kind == "s3" else f"file://{tmp_path}/store"
    mirror = mirror_of(url)
    for step in range(2, 8):
        made = make_checkpoint(tmp_path / f"made{step}", b"%d" % step * 100)
        mirror.upload(step, made)
    assert [one.step for one in mirror.whole()] == [4, 6, 7]
    assert mirror.fetch_newest(tmp_path / "run") == []
    assert files_of(tmp_path / "run" / "step_000007") == files_of(tmp_path / "made7")


def test_the_newest_is_fetched_whatever_else_is_named_like_a_checkpoint(tmp_path: Path) -> None:
    mirror, run = mirror_of(f"file://{tmp_path}/store"), tmp_path / "run"
    (run / "step_1000000-copy").mkdir(parents=True)
    for step in (999_999, 1_000_000):
        mirror.upload(step, make_checkpoint(tmp_path / f"made{step}", b"%d" % step))
        assert mirror.fetch_newest(run) == []
        assert (run / f"step_{step}").is_dir()


def test_ranges_are_read_in_parallel_and_equal_the_file(
    s3: S3, checkpoint: Path, tmp_path: Path
) -> None:
    store = UrlStore(s3.url("ranges"))
    upload_tree(store, "one", checkpoint)
    assert [path for method, path in s3.faults.requests if method == "PUT"][-1].endswith(
        "SHA256SUMS"
    )
    s3.faults.requests.clear()
    fetch_tree(store, "one", store.objects("one"), tmp_path / "got")
    reads = [path for method, path in s3.faults.requests if "model.safetensors" in path]
    assert len(reads) == 3
    assert files_of(tmp_path / "got") == files_of(checkpoint)
    check_digests(tmp_path / "got", required=True)


@pytest.mark.parametrize("most_bytes", [len(BIG), len(BIG) - 1])
def test_an_object_is_copied_by_the_store_or_through_here_when_it_is_too_large(
    s3: S3, most_bytes: int
) -> None:
    store = UrlStore(s3.url(f"copied-{most_bytes}"))
    store.put("one/a", BIG)
    store.copy(store.objects("one")[0], "two/a", most_bytes=most_bytes)
    assert store.read("two/a") == BIG


def test_a_torn_upload_is_never_seen(s3: S3, checkpoint: Path, tmp_path: Path) -> None:
    mirror = mirror_of(s3.url("torn"))
    mirror.upload(1, checkpoint)
    newer = make_checkpoint(tmp_path / "newer", BIG[::-1])
    s3.faults.set("503", method="PUT", only="SHA256SUMS")
    with pytest.raises(StoreAwayError, match="could not write step_000002"):
        mirror.upload(2, newer)
    assert [one.step for one in mirror.whole()] == [1]
    mirror.fetch_newest(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_000001"]
    s3.faults.set("", 0)
    mirror.upload(2, newer)
    assert [one.step for one in mirror.whole()] == [1, 2]


@pytest.mark.parametrize("fault", ["503", "cut", "wrong", "slow"])
def test_a_fault_that_passes_costs_nothing_but_time(s3: S3, tmp_path: Path, fault: str) -> None:
    slow = fault == "slow"  # what is asked for in time is small
    mirror = mirror_of(s3.url(f"passing-{fault}"), timeout_s=SLOW_S / 2 if slow else 60)
    checkpoint = make_checkpoint(tmp_path / "made", b"3" if slow else BIG)
    mirror.upload(3, checkpoint)
    s3.faults.set(fault, 1 if slow else 2, method="GET", only="safetensors")
    assert mirror.fetch_newest(tmp_path / "run") == []
    assert files_of(tmp_path / "run" / "step_000003") == files_of(checkpoint)
    s3.faults.set(fault, 1, method="PUT")
    mirror.upload(5, make_checkpoint(tmp_path / "more", b"5"))
    assert [one.step for one in mirror.whole()] == [3, 5]


def test_a_checkpoint_whose_bytes_stay_wrong_is_told_and_the_one_before_taken(
    s3: S3, checkpoint: Path, tmp_path: Path
) -> None:
    mirror = mirror_of(s3.url("wrong"))
    mirror.upload(1, checkpoint)
    mirror.upload(2, make_checkpoint(tmp_path / "two", b"2" * 99))
    s3.faults.set("wrong", method="GET", only="step_000002")
    wrong = mirror.fetch_newest(tmp_path / "run")
    assert "differs from what was written" in str(wrong[0])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_000001"]


def test_what_does_not_pass_is_told_with_what_to_do(s3: S3, tmp_path: Path) -> None:
    mirror = mirror_of(s3.url("told"), tries=2)
    s3.faults.set("507", method="PUT")
    with pytest.raises(StoreAwayError, match=r"could not write \.job.*") as full:
        mirror.check()
    assert full.value.may_pass
    assert "that it is not full" in full.value.hint
    s3.faults.set("403", method="PUT")
    with pytest.raises(StorageError, match=r"refuses to write \.job") as refused:
        mirror.check()
    assert not refused.value.may_pass
    assert "AWS_ACCESS_KEY_ID" in refused.value.hint
    s3.faults.set("", 0)
    with pytest.raises(StoreAwayError, match="NoSuchBucket"):
        mirror_of("s3://nosuchbucket/x").whole()
    with pytest.raises(ModelError, match="there are no files of a model at"):
        fetch_model(s3.url("no-model"))
    with environment({"AWS_ENDPOINT": "http://127.0.0.1:1"}), pytest.raises(StoreAwayError):
        mirror_of("s3://runs/x", tries=1).whole()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        UrlStore(f"file://{tmp_path}/file/below", tries=1).put("a", b"a")


def test_a_name_that_leads_out_of_its_folder_is_refused(s3: S3, tmp_path: Path) -> None:
    store = UrlStore(s3.url("names"))
    store.put("one/a", b"a")
    files = [store.objects("one")[0]._replace(name="one/../../a")]
    with pytest.raises(StorageError, match="is not a valid name of a file"):
        fetch_tree(store, "one", files, tmp_path / "got")


def test_another_runs_files_of_that_name_are_put_aside(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000009").mkdir(parents=True)
    own_folder(tmp_path, "b")
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints").mkdir()
    own_folder(tmp_path, "b")
    assert (tmp_path / "checkpoints").exists()


# -- the cache ---------------------------------------------------------------------------------


def fill_with(num_bytes: int) -> Callable[[Path], None]:
    def fetch(target: Path) -> None:
        target.mkdir()
        (target / "data").write_bytes(bytes(num_bytes))

    return fetch


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_what_was_asked_for_longest_ago_leaves_first_and_what_is_in_use_never(
    tmp_path: Path,
) -> None:
    cache = FolderCache(tmp_path, 100)
    for number, key in enumerate("abc"):
        cache.hold(key, 30, fill_with(30))
        os.utime(tmp_path / f"{key}.held", (number, number))
    for key in "bc":
        cache.release(key)
    cache.hold("d", 30, fill_with(30))
    assert names(tmp_path) == {"a", "c", "d"}
    other = FolderCache(tmp_path, 100)
    with pytest.raises(StorageError, match=r"no room for 41 bytes.*60 are in use"):
        other.hold("e", 41, fill_with(41))
    cache.release("a")
    other.hold("e", 41, fill_with(41))
    assert names(tmp_path) == {"d", "e"}


def test_a_disk_that_is_smaller_than_the_bound_bounds_the_cache(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path / "disk", 4) as disk:
        cache = FolderCache(disk, 1 << 40)
        for number, key in enumerate("abcd"):
            cache.hold(key, 1_500_000, fill_with(1_500_000))
            cache.release(key)
            os.utime(disk / f"{key}.held", (number, number))
        assert names(disk) == {"c", "d"}


ASKS = """
import sys, time
from pathlib import Path
from tinkermq.actors.storage.adapters import base_of, name_bases_by_url
from tinkermq.actors.storage.cache import FolderCache
def fetch(target):
    with Path(sys.argv[2]).open("a") as told:
        told.write("x")
    time.sleep(0.3)
    target.mkdir()
FolderCache(Path(sys.argv[1]), 100).hold("one", 10, fetch)
"""


def test_processes_that_ask_at_the_same_time_fetch_once(tmp_path: Path) -> None:
    words = [sys.executable, "-c", ASKS, str(tmp_path / "cache"), str(tmp_path / "told")]
    asking = [subprocess.Popen(words) for _ in range(4)]
    assert [one.wait(PATIENCE_S) for one in asking] == [0, 0, 0, 0]
    assert (tmp_path / "told").read_text() == "x"


def test_a_fetch_that_failed_leaves_nothing_and_is_made_again(tmp_path: Path) -> None:
    def fails(_: Path) -> None:
        raise StorageError("gone", hint="")

    cache = FolderCache(tmp_path, 100)
    with pytest.raises(StorageError, match="gone"):
        cache.hold("a", 90, fails)
    cache.hold("b", 90, fill_with(90))
    assert names(tmp_path) == {"b"}


def test_a_model_by_url_is_fetched_once(s3: S3, checkpoint: Path, tmp_path: Path) -> None:
    upload_tree(UrlStore(s3.url("models")), "tiny", checkpoint)
    with environment({"TINKERMQ_CACHE": str(tmp_path / "cache")}):
        first = fetch_model(s3.url("models/tiny"))
        s3.faults.requests.clear()
        assert fetch_model(s3.url("models/tiny")) == first
    assert not [path for _, path in s3.faults.requests if "safetensors" in path]
    assert files_of(Path(first)) == files_of(checkpoint)


def test_an_adapter_in_a_store_names_its_base_by_url_and_brings_it_along(
    s3: S3, checkpoint: Path, tmp_path: Path
) -> None:
    upload_tree(UrlStore(s3.url("models")), "base", checkpoint)
    base = fetch_model(s3.url("models/base"))
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    write_digests(made)
    link_tree(made, tmp_path / "held")
    name_bases_by_url(tmp_path / "held")
    check_digests(made, required=True)
    assert base_of(made) == base
    assert base_of(tmp_path / "held") == s3.url("models/base")  # a folder that anybody may write
    upload_tree(UrlStore(s3.url("runs")), "adapter", tmp_path / "held")
    assert base_of(fetch_model(s3.url("runs/adapter"))) == base


# -- whose files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "store", "allowed"),
    [
        ("s3://lab/pool/models/a", "s3://lab/pool/", True),
        ("s3://lab/pool/runs/ann/j/checkpoints/step_000001-0", None, True),
        ("owner/name", None, True),
        ("s3://lab/pool/runs/bob/j", None, False),
        ("s3://lab/pool/models/../runs/bob/j", None, False),
        ("s3://lab/pool/models/%2e%2e/runs/bob", None, False),
        ("s3://lab/pool/models/", None, False),
        ("s3://lab/pool", None, False),
        ("file:///etc", None, False),
        ("owner/name", "s3://lab/pool/runs/bob", False),
        ("owner/name", "file:///home", False),
    ],
)
def test_users_reach_models_and_their_own_runs_in_the_operators_stores_only(
    model: str, store: str | None, allowed: bool
) -> None:
    tree = {"model": {"path": model}, "env": {"game": "none"}, "storage": {"url": store}}
    config = JobConfig.model_validate(tree)
    with contextlib.nullcontext() if allowed else pytest.raises(ConfigError, match="outside of"):
        refuse_other_stores(config, "ann", ["s3://lab/pool"])


# -- Checkpoints in the broker: what was stored comes back, within its bound, and full is told -----


SMALL = os.urandom(3 << 20)


@pytest.fixture
async def mirror(broker: Broker) -> AsyncIterator[CheckpointMirror]:
    scope = JobScope("local", "checkpointed")
    limits = LimitsConfig(checkpoint_bytes=16 << 20)
    await create_job_streams(broker, scope, limits, weights_bytes=1 << 20, checkpoints=True)
    yield CheckpointMirror(BrokerStore(broker, scope), keep_last=2, keep_every=4)
    await delete_job_streams(broker, scope)


async def test_what_was_uploaded_to_the_broker_comes_back_and_the_newest_are_kept(
    mirror: CheckpointMirror, tmp_path: Path
) -> None:
    def use() -> None:
        mirror.check()
        for step in range(2, 8):
            mirror.upload(step, make_checkpoint(tmp_path / f"made{step}", SMALL))
        assert [one.step for one in mirror.whole()] == [4, 6, 7]
        assert mirror.fetch_newest(tmp_path / "run") == []

    await asyncio.to_thread(use)
    check_digests(tmp_path / "run" / "step_000007", required=True)
    assert (tmp_path / "run" / "step_000007" / "model.safetensors").read_bytes() == SMALL
    assert (tmp_path / "run" / "step_000007" / "empty").read_bytes() == b""


async def test_a_bound_that_is_too_small_is_told_and_the_checkpoint_before_stays(
    mirror: CheckpointMirror, tmp_path: Path
) -> None:
    await asyncio.to_thread(mirror.upload, 1, make_checkpoint(tmp_path / "one", SMALL))
    two = make_checkpoint(tmp_path / "two", os.urandom(15 << 20))
    with pytest.raises(StoreAwayError, match=r"broker: could not write step_000002") as full:
        await asyncio.to_thread(mirror.upload, 2, two)
    assert full.value.may_pass
    assert "limits.checkpoint_bytes must have room" in full.value.hint
    assert [one.step for one in await asyncio.to_thread(mirror.whole)] == [1]


async def test_what_killed_uploads_have_left_takes_no_room(
    mirror: CheckpointMirror, broker: Broker, tmp_path: Path
) -> None:
    bucket = JobScope("local", "checkpointed").object_checkpoints
    for _ in range(15):  # of the 16 MiB
        subject = f"$O.{bucket}.C.killed"
        await broker.append(subject, bytes(1 << 20), deadline_s=PATIENCE_S, waiting_for="a part")
    await asyncio.to_thread(mirror.check)
    await asyncio.to_thread(mirror.upload, 1, make_checkpoint(tmp_path / "one", SMALL))
    assert [one.step for one in await asyncio.to_thread(mirror.whole)] == [1]


def test_what_killed_uploads_to_a_folder_have_left_is_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    own = CheckpointMirror.of_run(
        f"file://{store}", JobScope("local", "mine"), keep_last=2, keep_every=0
    )
    own.upload(1, make_checkpoint(tmp_path / "one", SMALL))
    [step] = (path for path in store.glob("runs/local/mine/checkpoints/*") if path.is_dir())
    for folder in (step, store):
        (folder / "model.safetensors#1").touch()
    own.check()
    assert [path.name for path in store.rglob("*#*")] == ["model.safetensors#1"]
    assert [one.step for one in own.whole()] == [1]


async def test_a_store_whose_actor_ends_starts_nothing_any_more(
    mirror: CheckpointMirror,
) -> None:
    mirror.store.close()
    with pytest.raises(StorageError, match="was closed"):
        await asyncio.to_thread(mirror.whole)
