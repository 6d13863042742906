"""What an agent program sees and may do in its sandbox, and what it may not."""

import json
import os
import socket
import sys

import pytest
from tinkermq.schemas.wire.errors import ConfigError, SandboxError, TinkermqError

from tests.envs.agents.programs.conftest import hosting
from tests.support.waiting import until


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
            assert found == [["/episode/work/mine"], 2, True]


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
    [pytest.param(one, marks=pytest.mark.long if "small" in one else []) for one in LIMITED],
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
    with pytest.raises(ConfigError, match=r"agent.command: programs find no 'no-such-program'"):
        async with hosting(command=["no-such-program"]):
            pass
    with pytest.raises(ConfigError, match=r"agent.reward: programs find no './grade.sh'"):
        async with hosting(reward=["./grade.sh"]):
            pass
    with pytest.raises(ConfigError, match=r"agent.files='.*nowhere' is no folder on this host"):
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
    with pytest.raises(SandboxError, match="no bubblewrap on this machine") as error:
        async with hosting():
            pass
    assert "apt-get install bubblewrap" in error.value.hint
