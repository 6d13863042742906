"""Lines are appended whole or not at all, and one that was cut swallows no other."""

import subprocess
import sys
from pathlib import Path

from structlog.testing import capture_logs
from tinkermq.broker.disk import append_lines, read_objects


def test_a_line_that_was_cut_does_not_swallow_the_next_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    append_lines(path, ['{"step": 1}', '{"step": 2}'])
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    size = append_lines(path, ['{"step": 4}'])
    assert size == path.stat().st_size
    with capture_logs() as told:
        assert [one["step"] for one in read_objects(path)] == [1, 2, 4]
    assert [(one["event"], one["line"]) for one in told] == [("line_cut", 3)]


def test_what_does_not_fit_is_taken_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, ["short"])
    script = f"""
import errno, resource, signal
from pathlib import Path
from tinkermq.broker.disk import append_lines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
try:
    append_lines(Path({str(path)!r}), ["x" * 10, "y" * 10])
except OSError as error:
    assert error.errno == errno.EFBIG
else:
    raise AssertionError("it fitted")
append_lines(Path({str(path)!r}), ["fits"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "short\nfits\n"
