"""What is kept of what a program prints on two pipes, in whatever order they are read."""

import os

from tinkermq.envs.agents.programs.launcher import TAIL_BYTES, OutputReader, Printed

from tests.support.waiting import PATIENCE_S


def printed(*said: tuple[str, bytes]) -> Printed:
    """Return what a program has printed, pipe by pipe in this order."""
    reader = OutputReader()
    try:
        out, out_in = os.pipe()
        errors, errors_in = os.pipe()
        kept = reader.follow(out, errors)
        for pipe, text in said:
            os.write(out_in if pipe == "out" else errors_in, text)
        os.close(out_in)
        os.close(errors_in)
        assert kept.ended.wait(PATIENCE_S)
        return kept
    finally:
        reader.stop()


def test_errors_are_told_however_much_output_is_read_after_them() -> None:
    kept = Printed()
    kept.errors.add(b"Traceback: no rule")
    kept.both.add(b"Traceback: no rule")
    kept.both.add(b"x" * 2 * TAIL_BYTES)
    tail = kept.tail()
    assert tail.startswith("Traceback: no rule" + "x")
    assert len(tail) == TAIL_BYTES


def test_what_fits_is_told_once_and_output_stays_apart() -> None:
    kept = printed(("out", b"reward 1\n"), ("errors", b"a warning\n"))
    assert sorted(kept.tail().splitlines()) == ["a warning", "reward 1"]
    assert kept.out.text() == "reward 1\n"
    assert printed().tail() == ""
