"""Programs in images of containers: those of podman, made here from a folder with busybox."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from tinkermq.envs.agents.programs.sandbox import ImageRoot
from tinkermq.schemas.config.agent import AgentConfig
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import ConfigError, SandboxError

from tests.envs.agents.programs.conftest import hosting
from tests.support.waiting import PATIENCE_S

_TOOLS = ("podman", "busybox")
LACKING = [one for one in _TOOLS if shutil.which(one) is None]
IMAGE = "localhost/tinkermq-test:latest"
ASK = """
wget -q -O answer --header "Authorization: Bearer $OPENAI_API_KEY" \
  --header "Content-Type: application/json" \
  --post-data '{"model": "policy", "messages": [{"role": "user", "content": "2 + 2?"}]}' \
  $OPENAI_BASE_URL/chat/completions || exit 1
"""


def podman(*words: str, stdin: int | None = None) -> None:
    """Run podman, which is to succeed."""
    done = subprocess.run(
        ["podman", *words], stdin=stdin, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def imported(root: Path, *changes: str) -> None:
    """Make a folder the image."""
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        assert tar.stdout is not None
        options = [word for one in changes for word in ("--change", one)]
        podman("import", *options, "-", IMAGE, stdin=tar.stdout.fileno())


@pytest.fixture
def image(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An image in a storage of its own; the path of the folder that it was made of."""
    if LACKING:
        pytest.skip(f"not installed: {', '.join(LACKING)}")
    storage = tmp_path_factory.mktemp("storage")
    settings = storage / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{storage}/graph"\nrunroot = "{storage}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(settings))
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, root / "bin" / "busybox")
    for name in ("sh", "wget", "cat", "ls", "sleep", "touch", "test", "echo", "env", "id", "tail"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "of-the-image").write_text("image\n")
    imported(root, "ENV PATH=/bin:/opt", "ENV OF_IMAGE=yes", "ENV OPENAI_BASE_URL=http://elsewhere")
    yield root
    podman("rmi", "-f", IMAGE)


@pytest.mark.long
@pytest.mark.usefixtures("image")
async def test_a_program_in_an_image_sees_that_and_reaches_the_model(tmp_path: Path) -> None:
    (tmp_path / "grader").mkdir()
    (tmp_path / "grader" / "grade.sh").write_text("cat answer >&2; cat /episode/grader/worth\n")
    (tmp_path / "grader" / "worth").write_text("0.5")
    for path in (tmp_path / "grader", tmp_path / "grader" / "grade.sh"):
        path.chmod(0o755)
    script = f"""{ASK}
cat /of-the-image; echo $OF_IMAGE; id -u
for one in /usr/bin /root /home /episode/grader/worth {Path.home()} {tmp_path}; do
  test -e $one && echo "sees $one"; done
touch /written 2>/dev/null && echo "writes"
wget -q -T 1 -O /dev/null http://192.0.2.1/ 2>/dev/null && echo "reaches"
(sleep 1000 &) ; (sleep 1000 &)
"""
    async with hosting(
        image=IMAGE,
        command=["sh", "-c", script],
        reward=["sh", "{grader}/grade.sh"],
        reward_files=str(tmp_path / "grader"),
    ) as host:
        result = await host.play()
    said = result.info["output"].split("\n")
    assert (result.reward, result.info["outcome"]) == (0.5, "done")
    assert said[:2] == ["image", "yes"]
    assert int(said[2]) != 0
    assert not any(line.split()[:1] in (["sees"], ["writes"], ["reaches"]) for line in said[3:])


@pytest.mark.long
@pytest.mark.usefixtures("image")
async def test_limits_hold_in_an_image() -> None:
    flood = ASK + "tail /dev/zero"
    async with hosting(image=IMAGE, command=["sh", "-c", flood]) as host:
        result = await host.play()
    assert (result.info["outcome"], result.info["limit"]) == ("crash", "memory")
    forks = ASK + "while true; do sleep 1000 & done"
    async with hosting(image=IMAGE, command=["sh", "-c", forks], timeout_s=2) as host:
        result = await host.play()
    assert result.info["outcome"] in ("timeout", "crash")


@pytest.mark.long
@pytest.mark.usefixtures("image")
async def test_hosts_share_the_files_of_an_image_and_the_last_one_removes_them() -> None:
    first, second = await asyncio.gather(
        asyncio.to_thread(ImageRoot, IMAGE), asyncio.to_thread(ImageRoot, IMAGE)
    )
    assert first.path == second.path
    assert (first.path / "of-the-image").read_text() == "image\n"
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.parent.exists()


@pytest.mark.long
async def test_an_image_that_cannot_be_used_is_refused_at_the_start(image: Path) -> None:
    with pytest.raises(
        SandboxError, match=r"image='localhost/none:1' is not on .*podman says"
    ) as e:
        async with hosting(image="localhost/none:1", command=["sh"]):
            pass
    assert "podman pull localhost/none:1" in e.value.hint
    with pytest.raises(ConfigError, match=r"agent.command: programs find no 'python3'"):
        async with hosting(image=IMAGE, command=["{python}", "agent.py"]):
            pass
    (image / "episode").symlink_to("/root")
    imported(image)
    with pytest.raises(SandboxError, match="the image has a link or a file at /episode"):
        async with hosting(image=IMAGE, command=["sh"]):
            pass


async def test_a_machine_with_neither_podman_nor_docker_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"needs podman or docker, and .* has neither") as error:
        async with hosting(image=IMAGE, command=["sh"]):
            pass
    assert "apt-get install podman" in error.value.hint


@pytest.mark.parametrize("name", ["--privileged", "a b", "", "../x"])
def test_what_is_no_name_of_an_image_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"image|String"):
        AgentConfig(command=["sh"], image=name)


def test_an_image_without_a_command_has_no_effect_and_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image has no effect while command is \[\]"):
        JobConfig.model_validate(
            {"model": {"path": "m"}, "env": {"hosts": 0}, "agent": {"client": True, "image": "a"}}
        )
