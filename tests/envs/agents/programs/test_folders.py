"""The folders of a machine's hosts, which come and go beside each other."""

import os
import subprocess
import sys
from pathlib import Path

COME_AND_GO = """
from concurrent.futures import ThreadPoolExecutor
from tinkermq.envs.agents.programs.folders import ProgramFolders

def come_and_go(number):
    for _ in range(100):
        folders = ProgramFolders()
        assert folders.path.is_dir()
        folders.close()

with ThreadPoolExecutor(8) as threads:
    list(threads.map(come_and_go, range(8)))
"""


def test_hosts_that_come_and_go_leave_each_other_alone_and_nothing_of_a_killed_one(
    tmp_path: Path,
) -> None:
    left = tmp_path / "tinkermq-programs-left"
    left.mkdir()
    (left / "lock").touch()
    elsewhere = tmp_path / "tinkermq-programs-link"
    elsewhere.symlink_to(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COME_AND_GO],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [elsewhere]
