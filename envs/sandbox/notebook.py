"""An interpreter that runs programs one after the other, as cells of a notebook.

`inside.py` runs it in a sandbox for `interpreters.py`; it imports no module of tinkermq. It reads a
length of four bytes and a program on standard input; a byte on the descriptor `done` says that the
program has ended. The value of a last expression is printed. A program may do anything to this
process, so its output is not trusted: at worst the episode loses its own output.
"""

import _ast
import builtins
import os
import sys
import types


def main() -> None:
    """Run programs until standard input ends."""
    done = int(sys.argv[1])
    incoming = os.dup(0)
    os.set_inheritable(done, False)
    with open("/dev/null", "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for file in (1, 2):
        stream = open(file, "w", 1, "utf-8", "backslashreplace", closefd=False)
        setattr(sys, ("stdout", "stderr")[file - 1], stream)
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    number = 0
    while head := os.read(incoming, 4):
        number += 1
        length = int.from_bytes(head, "little")
        code = b""
        while len(code) < length:
            code += os.read(incoming, length - len(code))
        reap()
        runs_programs = os.getpid()
        well = run(code.decode("utf-8", "replace"), module.__dict__, f"<program {number}>")
        if os.getpid() != runs_programs:  # in a child that the program forked, at the program's end
            os._exit(0 if well else 1)
        os.write(done, b"." if well else b"!")


def run(source: str, names: dict[str, object], file: str) -> bool:
    """Run one program; return whether it ended without an error."""
    try:
        tree = compile(source, file, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, _ast.Module)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, _ast.Expr):
            tree.body.pop()
        exec(compile(tree, file, "exec", dont_inherit=True), names)
        if isinstance(last, _ast.Expr):
            value = eval(compile(_ast.Expression(last.value), file, "eval"), names)
            if value is not None:
                print(value)
        return flush()
    except SystemExit as ended:
        flush()
        return ended.code in (None, 0)
    except BaseException as error:
        flush()
        print_traceback(error, source, file)
        return False


def reap() -> None:
    """Reap processes that ended since the last program."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def flush() -> bool:
    """Flush the buffers; return whether that was possible."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return False
    return True


def print_traceback(error: BaseException, source: str, file: str) -> None:
    """Print the traceback without the frames of this file."""
    try:
        import linecache
        import traceback

        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == "<string>":
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace, limit=-8)
    except BaseException:
        os.write(2, type(error).__name__.encode())


if __name__ == "__main__":
    main()
