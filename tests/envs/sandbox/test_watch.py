"""What a sandbox is charged with is its own, also while it is still being made."""

import contextlib
import os

from tinkermq.envs.sandbox.sandbox import descendants, filesystem, num_files


def test_a_process_among_our_own_folders_is_charged_with_none_of_their_files() -> None:
    assert os.statvfs("/tmp").f_files > os.statvfs("/tmp").f_ffree
    assert filesystem(os.getpid(), "tmp") is None
    assert num_files(os.getpid()) == 0


def test_the_files_of_a_sandbox_are_counted(sandbox) -> None:
    with contextlib.closing(sandbox.session()) as session:
        assert session.run("for n in range(300): open(f'{n}', 'w')").status == "ok"
        assert max(num_files(one) for one in descendants(os.getpid())) >= 300
