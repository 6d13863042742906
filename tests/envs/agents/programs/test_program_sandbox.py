"""What a program sees and may do in its sandbox or in an image."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from tinkermq.envs.agents.programs.sandbox import WORK, ImageRoot
from tinkermq.schemas.config.agent import AgentConfig
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import ConfigError, SandboxError, TinkermqError

from tests.envs.agents.programs.conftest import hosting
from tests.support.waiting import PATIENCE_S, until


def telling(expression: str) -> str:
    """Return a program that prints what an expression is, as JSON."""
    return f"ask(); post('/reward', reward=0)\nprint(json.dumps({expression}))"


async def told(play, expression, before="", **config):
    result = await play(f"{before}\n{telling(expression)}", **config)
    return json.loads(result.info["output"].splitlines()[-1])


async def test_a_program_is_told_its_task_and_nothing_of_the_host(play, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("TZ", "UTC")
    variables = await told(
        play,
        "dict(os.environ)",
        opening={"seed": 7, "kwargs": {"level": 3}, "split": "val"},
        environment={"MY_SETTING": "1"},
    )
    given = {name for name in variables if not name.startswith(("OPENAI", "XDG"))}
    assert given == {
        *("PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME", "TMPDIR", "NO_PROXY", "no_proxy"),
        *("IS_SANDBOX", "MY_SETTING", "TINKERMQ_TASK", "TINKERMQ_EPISODE", "TINKERMQ_SEED"),
        *("TINKERMQ_SPLIT", "TINKERMQ_WORKDIR", "TINKERMQ_REWARD", "LC_CTYPE"),
    } - ({"LC_CTYPE"} - set(variables))
    assert (variables["TINKERMQ_SEED"], variables["TINKERMQ_SPLIT"]) == ("7", "val")
    read = "json.load(open(os.environ['TINKERMQ_TASK']))"
    assert await told(play, read, opening={"kwargs": {"level": 3}}) == {"level": 3}


async def test_the_words_of_a_command_are_filled_and_no_shell_reads_them():
    prompt = "what is $HOME; {input} `ls`?"
    command = ["{python}", "-S", "-c", "import sys; print(sys.argv[1:])", "{prompt}|{workdir}"]
    command += ["{input}", "{python}{python}"]
    reward = ["sh", "-c", "echo 1"]
    async with hosting(command=["sh", "-c", "exit 0"], reward=reward) as host:
        host.runner._config.command[:] = command
        with pytest.raises(TinkermqError, match="without one answered call") as error:
            await host.play(kwargs={"prompt": prompt})
    python = sys.executable * 2
    words = [f"{prompt}|/episode/work", "/episode/task/input.json", python]
    assert str(words) in error.value.hint


async def test_files_are_copied_for_each_try_with_their_rights_and_links(play, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text("#!/bin/sh\necho from a tool\n")
    (tmp_path / "bin/tool").chmod(0o4755)
    (tmp_path / "link").symlink_to("bin/tool")
    (tmp_path / "out").symlink_to("/etc/shadow")
    code = (
        "said = subprocess.run(['./link'], capture_output=True, text=True).stdout\n"
        "mode = oct(os.stat('bin/tool').st_mode & 0o7777)\n"
        "open('bin/tool', 'a').write('echo once')\n"
    )
    seen = "[said, mode, os.path.exists('out'), sorted(os.listdir())]"
    for _ in range(2):
        answer = await told(play, seen, code, files=str(tmp_path))
        assert answer == ["from a tool\n", "0o755", False, ["bin", "link", "out"]]


async def test_a_program_reads_what_is_named_and_nothing_else(play, tmp_path):
    folders = {name: tmp_path / name for name in ("read", "run", "other")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "text").write_text(name)
    code = (
        "def read(path):\n  try: return open(path).read()\n  except OSError: return None\n"
        "def write(path):\n  try: open(path, 'w').close()\n  except OSError: return False\n"
        "  return True\n"
    )
    reads = [str(folder / "text") for folder in folders.values()]
    reads += [f"/proc/{os.getpid()}/environ", "/etc/shadow", __file__]
    writes = ["/etc/x", "/usr/x", str(folders["read"] / "x"), sys.executable, "/x"]
    own = ["/tmp/x", "/dev/shm/x", "/episode/home/x", "x", "/episode/task/x"]
    seen = await told(
        play,
        f"[[read(one) for one in {reads}], [write(one) for one in {writes + own}]]",
        code,
        read=[str(folders["read"])],
        private=(folders["run"],),
    )
    assert seen == [["read", *[None] * 5], [*[False] * len(writes), *[True] * len(own)]]


async def test_two_programs_see_nothing_of_each_other():
    code = (
        "open('mine', 'w').write(os.environ['TINKERMQ_EPISODE']); ask()\n"
        "while not os.path.exists('/tmp/go'):\n  time.sleep(0.02)\n"
        "found = subprocess.run(['find', '/', '-name', 'mine'], capture_output=True)\n"
        "pids = [one for one in os.listdir('/proc') if one.isdigit()]\n"
    )
    seen = "[found.stdout.decode().split(), len(pids), os.path.exists('/tmp/go')]"
    async with hosting(code + telling(seen)) as host:
        for episode in ("e-1", "f-1"):
            await host.begin(episode)
        episodes = list(host.endpoint.episodes.values())
        await until(lambda: all(one.num_calls for one in episodes), "both programs")
        assert host.runner._launcher is not None
        for folder in host.runner._launcher.folders.path.glob("*/tmp"):
            (folder / "go").write_text("")
        for episode in ("e-1", "f-1"):
            result = await host.end(episode)
            found = json.loads(result.info["output"].splitlines()[-1])
            assert found == [[f"{WORK}/mine"], 2, True]


async def test_a_program_reaches_the_model_and_no_other_address(play):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code = (
            "import socket\ndef reach(*address):\n"
            "  try: socket.create_connection(address, timeout=2).close()\n"
            "  except OSError: return False\n  return True\n"
        )
        tries = f"[reach('127.0.0.1', {port}), reach('192.0.2.1', 80), reach('pypi.org', 443)]"
        assert await told(play, tries, code) == [False, False, False]
        reached = f"reach('127.0.0.1', {port})"
        assert await told(play, reached, code, network="open") is True


LIMITED = {
    "memory": "held = [bytearray(os.urandom(1 << 20)) for _ in range(400)]",
    "memory of many processes": (
        "for _ in range(7):\n  if not os.fork(): break\n"
        "held = bytearray(os.urandom(1 << 20)) * 30\ntime.sleep(1000)"
    ),
    "memory in files": (
        "for n in range(2): open(f'/dev/shm/{n}', 'wb').write(bytes(15 << 20))\n"
        "held = [bytearray(os.urandom(1 << 20)) for _ in range(110)]\ntime.sleep(1000)"
    ),
    "disk": "for n in range(4): open(f'{n}', 'wb').write(bytes(8 << 20))\ntime.sleep(1000)",
    "disk of small files": (
        "for n in range(1 << 20):\n  if not n % 1000: os.mkdir(f'{n // 1000}')\n"
        "  os.close(os.open(f'{n // 1000}/{n}', os.O_CREAT))\ntime.sleep(1000)"
    ),
    "disk at the bottom of a deep folder": (
        "for _ in range(1200):\n  os.mkdir('deeper'); os.chdir('deeper')\n"
        "for n in range(4): open(f'{n}', 'wb').write(bytes(8 << 20))\ntime.sleep(1000)"
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.full if "small" in one else []) for one in LIMITED],
)
async def test_a_program_over_a_limit_is_ended(play, name):
    result = await play(f"ask()\n{LIMITED[name]}")
    assert (result.info["outcome"], result.info.get("limit")) == ("crash", name.split()[0])


async def test_a_fork_bomb_ends_at_its_own_limit(play):
    code = "ask(); post('/reward', reward=1)\nnumber = 0\nwhile True:\n"
    code += "  try:\n    if not os.fork(): time.sleep(1000)\n    number += 1\n"
    code += "  except OSError: break\nprint(number)"
    result = await play(code, processes=12)
    assert result.info["outcome"] == "done"
    assert 5 <= int(result.info["output"]) <= 12


async def test_a_program_that_floods_goes_on_and_what_it_said_last_is_kept(play):
    code = "ask(); post('/reward', reward=1)\nfor n in range(3000): print('x' * 1000)\n"
    code += "print('last', file=sys.stderr)\nprint('words')"
    result = await play(code)
    assert (result.reward, len(result.info["output"])) == (1, 8 << 10)
    said = result.info["output"].split()
    assert "last" in said
    assert said[-1] == "words" or said[-2:] == ["words", "last"]


async def test_what_cannot_be_hosted_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"agent.command: programs do not find 'no-such-program'"):
        async with hosting(command=["no-such-program"]):
            pass
    with pytest.raises(ConfigError, match=r"agent.reward: programs do not find './grade.sh'"):
        async with hosting(reward=["./grade.sh"]):
            pass
    with pytest.raises(ConfigError, match=r"agent.files='.*nowhere' is not a folder on this host"):
        async with hosting(files=str(tmp_path / "nowhere")):
            pass
    with pytest.raises(ConfigError, match=r"programs would see .*run in .*agent.read"):
        async with hosting(read=[str(tmp_path)], private=(tmp_path / "run",)):
            pass
    (tmp_path / "shut").mkdir(mode=0o700)
    if os.getuid() == 0:
        with pytest.raises(ConfigError, match=r"may not read agent.read=.*shut") as error:
            async with hosting(read=[str(tmp_path / "shut")]):
                pass
        assert "chmod -R o+rX" in error.value.hint
    (tmp_path / "big").write_bytes(os.urandom(17 << 20))
    with pytest.raises(SandboxError, match=r"holds more than 16 MiB: more than agent.disk_mb=16"):
        async with hosting(files=str(tmp_path)):
            pass


async def test_a_machine_without_bubblewrap_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="bubblewrap is not installed here") as error:
        async with hosting():
            pass
    assert "apt-get install bubblewrap" in error.value.hint


# -- Programs in images of containers: those of podman, made here from a folder with busybox -------


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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
async def test_an_image_that_cannot_be_used_is_refused_at_the_start(image: Path) -> None:
    with pytest.raises(
        SandboxError, match=r"image='localhost/none:1' is not on .*podman says"
    ) as e:
        async with hosting(image="localhost/none:1", command=["sh"]):
            pass
    assert "podman pull localhost/none:1" in e.value.hint
    with pytest.raises(ConfigError, match=r"agent.command: programs do not find 'python3'"):
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
