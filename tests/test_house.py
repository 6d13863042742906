"""The house stays in order: packaging, imports, sizes and docstrings."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinkermq

from tests.support.waiting import PATIENCE_S
from tests.support.wheel import PACKAGE, ROOMS, build_wheel

ROOT = Path(__file__).resolve().parent.parent
Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
BESIDE = ("tests", "benchmarks", "examples")
MAX_LINES = 800
HEAVY = {"torch", "transformers", "vllm", "safetensors"}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def dotted(path: Path) -> str:
    name = "tinkermq." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports_of(names: set[str], *folders: str) -> list[str]:
    """Return who imports one of these top-level names absolutely, also inside functions."""
    line = re.compile(rf"^\s*(?:import|from) .*\b(?:{'|'.join(sorted(names))})\b", re.MULTILINE)
    found: list[str] = []
    for path in modules(*folders):
        text = path.read_text()
        if not line.search(text):
            continue  # parsing all takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported = [str(node.module)]
            else:
                continue
            wrong = [name for name in imported if name.split(".")[0] in names]
            found += [f"{short(path)} imports {name}" for name in wrong]
    return found


def expressions(*folders: str, naming: tuple[str, ...]) -> Iterator[tuple[Path, ast.AST]]:
    """Yield the nodes of the modules that hold one of these texts; parsing all takes seconds."""
    for path in modules(*folders):
        text = path.read_text()
        if any(name in text for name in naming):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


# -- packaging -------------------------------------------------------------------------------------


def test_the_packages_in_pyproject_are_the_folders_on_disk() -> None:
    setuptools = pyproject()["tool"]["setuptools"]
    folders = {short(path.parent) for path in modules(*ROOMS)}
    assert setuptools["package-dir"] == {
        "tinkermq": PACKAGE,
        **{"tinkermq." + folder.replace("/", "."): folder for folder in folders},
    }
    assert set(setuptools["packages"]) == set(setuptools["package-dir"])


def test_every_folder_of_a_room_has_an_init() -> None:
    folders = {path.parent for path in modules(*ROOMS)}
    assert not [short(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_there_is_no_tinkermq_folder_and_the_type_checker_finds_the_rooms() -> None:
    assert not (ROOT / "tinkermq").exists()
    links = {path.name: path.resolve() for path in (ROOT / "typings" / "tinkermq").iterdir()}
    package = {"__init__.py": ROOT / PACKAGE / "__init__.py"}
    assert links == {**package, **{room: ROOT / room for room in ROOMS}}


@pytest.mark.full
def test_the_wheel_holds_the_rooms_and_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        names = archive.namelist()
        entry_points, metadata = (
            archive.read(next(name for name in names if name.endswith(f".dist-info/{file}")))
            for file in ("entry_points.txt", "METADATA")
        )
    code = {name for name in names if ".dist-info/" not in name}
    ours = {f"tinkermq/{short(path)}" for path in [*modules(*ROOMS), *shipped_files()]}
    assert code == {*ours, "tinkermq/__init__.py", "tinkermq/py.typed"}
    assert b"tinkermq = tinkermq.clients.cli:main" in entry_points
    assert not dead_links(metadata.decode())


def dead_links(description: str) -> list[str]:
    """Return the links that a package index could not follow: relative ones, and into no file."""
    project = pyproject()["project"]
    release = rf"{project['urls']['Repository']}/(?:blob|raw)/v{project['version']}/([^#]*)"
    links = re.findall(r'(?:\]\(|src="|href=")([^)"\s]+)', description)
    assert links
    own = {link: re.match(release, link) for link in links}
    return [
        link
        for link, ours in own.items()
        if not (link.startswith("https://") if ours is None else (ROOT / ours[1]).exists())
    ]


def shipped_files() -> list[Path]:
    """Return what the gateway sends to browsers, or makes it of, what commands write, and types."""
    places = [ROOT / "actors" / "gateway" / "pages" / name for name in ("static", "templates")]
    places += [ROOT / "clients" / f"new_{what}" for what in ("game", "agent", "environment")]
    places.append(ROOT / "clients" / "cli")
    found = [path for place in places for path in place.rglob("*") if is_data(path)]
    return [*found, *(ROOT / "clients").glob("*.pyi")]


def is_data(path: Path) -> bool:
    return path.is_file() and path.suffix not in {".py", ".pyc"}


# -- imports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["-c", "import schemas"], ["-m", "actors.scheduler"]], ids=str)
def test_a_room_outside_of_the_package_says_how_it_is_meant(words: list[str]) -> None:
    told = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1
    assert "this room is a part of the package tinkermq: write `tinkermq." in told.stderr


def test_a_room_imports_the_rooms_relatively() -> None:
    assert not imports_of({"tinkermq", *ROOMS}, *ROOMS)


def test_what_stands_beside_the_rooms_imports_them_as_tinkermq() -> None:
    assert not imports_of(set(ROOMS), *BESIDE)


def loaded_by(names: list[str]) -> set[str]:
    """Return the top-level modules in `sys.modules` after importing `names` in a new process."""
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


NEEDS_OPENENV = "tinkermq.envs.openenv_server"
"""Needs a package that is not installed for development (`make test-openenv`)."""


def importable(*folders: str) -> list[str]:
    names = [dotted(path) for path in modules(*folders) if path.stem != "__main__"]
    return [name for name in names if name != NEEDS_OPENENV]


def test_what_needs_no_torch_starts_without_it() -> None:
    rooms = ("schemas", "broker", "envs", "clients")
    services = ("actors/scheduler", "actors/node", "actors/gateway")
    names = [*importable(*rooms, *services), "tinkermq.actors.environment"]
    if HEAVY & loaded_by(names):
        assert not [name for name in names if HEAVY & loaded_by([name])]


def test_who_sends_no_arrays_starts_without_numpy() -> None:
    names = [
        "tinkermq.actors.scheduler",
        "tinkermq.actors.node.node",
        "tinkermq.clients.cli.runs",
    ]
    assert "numpy" not in loaded_by(names)


def test_a_client_starts_without_pyarrow() -> None:
    assert "pyarrow" not in loaded_by(["tinkermq.clients", "tinkermq.clients.cli.app"])


# -- sizes and docstrings --------------------------------------------------------------------------


def test_the_version_that_services_tell_is_that_of_the_package() -> None:
    assert tinkermq.__version__ == pyproject()["project"]["version"]


def test_no_two_public_classes_have_one_name() -> None:
    public_class = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)
    named = Counter(
        name for path in modules(*ROOMS) for name in public_class.findall(path.read_text())
    )
    assert not [name for name, count in named.items() if count > 1]


def test_no_module_is_longer_than_a_reader_bears() -> None:
    too_long = {
        short(path): length
        for path in modules(*ROOMS, *BESIDE)
        if (length := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not too_long


@pytest.mark.parametrize("room", ROOMS)
def test_everything_public_has_a_docstring(room: str) -> None:
    missing = [name for path in modules(room) for name in undocumented(path)]
    assert not missing


def undocumented(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    if not ast.get_docstring(tree):
        yield short(path)
    for node in public(tree):
        yield from (f"{short(path)}:{found.lineno}" for found in _bare(node))


def public(node: ast.Module | ast.ClassDef) -> Iterator[Named]:
    for child in node.body:
        if isinstance(child, Named) and not child.name.startswith("_"):
            yield child


def _bare(node: Named) -> Iterator[Named]:
    if not ast.get_docstring(node):
        yield node
    if isinstance(node, ast.ClassDef):
        for method in public(node):
            yield from _bare(method)


@pytest.mark.parametrize("room", ROOMS)
def test_an_init_holds_a_docstring_and_re_exports_only(room: str) -> None:
    wrong = [
        f"{short(path)}:{node.lineno}"
        for path in modules(room)
        if path.name == "__init__.py"
        for node in ast.parse(path.read_text()).body
        if not re_exports(node)
    ]
    assert not wrong


def re_exports(node: ast.stmt) -> bool:
    """Say whether a statement is a docstring or re-exports, also ones made at first use."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in {"__all__", "_HOMES"}
    if isinstance(node, ast.FunctionDef):
        return node.name in {"__getattr__", "__dir__"}
    if isinstance(node, ast.If):
        if ast.unparse(node.test).startswith("__name__ != "):  # a room outside of the package
            return True
        return ast.unparse(node.test) == "TYPE_CHECKING" and all(map(re_exports, node.body))
    return isinstance(node, ast.ImportFrom)


def test_every_lint_ignore_says_which_rule_and_why() -> None:
    reasoned = re.compile(r"# noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)*\s+\W*\w+.* \w+")
    wrong: list[str] = []
    for path in modules(*ROOMS):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            unexplained = "# noqa" in line and not reasoned.search(line)
            sweeping = "# type: ignore" in line or re.search(r"# pyright: ignore(?!\[)", line)
            if unexplained or sweeping:
                wrong.append(f"{short(path)}:{number} {line.strip()}")
    assert not wrong


WHAT_ERRORS_SAY = ("str(error)", "str(raised)", "repr(error)", "error.message", "raised.message")


def reads_a_message(node: ast.AST) -> bool:
    """Say whether a comparison, or a question to a text, is about what an error says."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn | ast.Eq):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr not in {"startswith", "endswith", "find"}:
            return False
        sides = [node.func.value]
    else:
        return False
    return any(ast.unparse(side).removesuffix(".lower()") in WHAT_ERRORS_SAY for side in sides)


def test_nothing_is_decided_by_what_an_error_says() -> None:
    deciding = [
        f"{short(path)}:{node.lineno}"
        for path, node in expressions(*ROOMS, naming=WHAT_ERRORS_SAY)
        if isinstance(node, ast.expr) and reads_a_message(node)
    ]
    assert not deciding


def test_no_wait_swallows_a_cancellation() -> None:
    """Python 3.11's `asyncio.wait_for` does when what it waits for comes in the same moment."""
    swallowing = [
        f"{short(path)}:{node.lineno}"
        for path, node in expressions(*ROOMS, naming=("wait_for",))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]
    assert not swallowing, "use `async with asyncio.timeout(seconds):`"


def test_no_file_of_the_working_folder_hides_a_module_from_a_process_of_ours() -> None:
    """With `-m` and `-c` alone, Python looks for modules in the working folder first."""
    open_to_it = [
        f"{short(path)}:{node.lineno}"
        for path, node in expressions(*ROOMS, naming=(".executable", ".python"))
        if isinstance(node, ast.List | ast.Tuple | ast.Call)
        and re.search(r"\b(sys\.executable|config\.python), '-[mc]'", ast.unparse(node))
    ]
    assert not open_to_it, "give `-P` as the first argument"


def test_no_merge_was_left_half_done() -> None:
    marks = ["-e", "^<{7} ", "-e", "^>{7} "]
    found = subprocess.run(
        ["git", "grep", "-IlE", *marks], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


def test_code_of_a_model_is_trusted_only_by_those_who_say_so() -> None:
    """Every parameter and key `trust_remote_code` is false by default, and nobody passes True."""
    trusting: list[str] = []
    folders = (*ROOMS, "examples", "benchmarks")
    for path, node in expressions(*folders, naming=("trust_remote_code",)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = dict(zip(reversed(node.args.args), reversed(node.args.defaults), strict=False))
            named |= dict(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
            pairs = [(argument.arg, value) for argument, value in named.items()]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.Call):
            pairs = [(str(word.arg), word.value) for word in node.keywords]
        else:
            continue
        for name, value in pairs:
            if name == "trust_remote_code" and getattr(value, "value", False) is True:
                trusting.append(f"{short(path)}:{node.lineno}")
    assert not trusting


# -- paths -----------------------------------------------------------------------------------------

NAMED_PATH = re.compile(rf"`((?:{'|'.join((*ROOMS, *BESIDE))})/[\w/.]+)`")


def test_paths_that_pages_and_docstrings_name_are_there() -> None:
    """A folder counts if it holds files other than byte code."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    missing = [
        f"{short(path)} names {name}"
        for path in [*pages, *modules(*ROOMS, *BESIDE)]
        for name in NAMED_PATH.findall(path.read_text())
        if not is_there(ROOT / name)
    ]
    assert not missing


def is_there(path: Path) -> bool:
    return path.is_file() or any(one.is_file() and one.suffix != ".pyc" for one in path.rglob("*"))


# -- run folders -----------------------------------------------------------------------------------

OUTSIDE = ("actors/scheduler", "actors/gateway", "actors/node")
"""Services that work in run folders outside of the sandboxes of those who write there."""
ALSO_OUTSIDE = (
    "broker/kept_rollouts.py",
    "actors/storage/access.py",
    "actors/storage/run_folders.py",
)
ON_DISK = {
    "os": "open link symlink scandir listdir walk rename replace unlink remove rmdir mkdir "
    "makedirs stat lstat chmod truncate mknod mkfifo",
    "shutil": "copy copy2 copyfile copytree move rmtree",
    "": "read_text read_bytes write_text write_bytes iterdir glob rglob symlink_to hardlink_to "
    "touch mkdir rmdir",
}
NOT_IN_RUN_FOLDERS = {
    "actors/storage/access.py": "looks where links of a folder lead, and opens nothing there",
    "actors/gateway/pages/render.py": "its own pages",
    "actors/node/fork_server.py": "its own threads",
    "actors/node/machine.py": "where the names of nodes are held",
    "actors/node/sandbox.py": "the machine's devices, and a folder that it made for a socket",
    "actors/scheduler/machines/ray.py": "a key that the operator named",
}


def disk_calls(path: Path) -> Iterator[str]:
    """Yield the calls of a module that name a file by its path."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            yield f"open:{node.lineno}"
        if isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            names = ON_DISK.get(owner, ON_DISK[""]).split()
            first = (
                node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            )
            opens = called.attr == "open" and first in ("r", "rb", "w", "wb", "a", "ab", "x", "xb")
            if called.attr in names or opens:
                yield f"{ast.unparse(called)}:{node.lineno}"


def test_services_reach_into_run_folders_in_one_way() -> None:
    places = [*modules(*OUTSIDE), *(ROOT / one for one in ALSO_OUTSIDE)]
    found = {short(path): list(disk_calls(path)) for path in places}
    strange = {name: calls for name, calls in found.items() if calls}
    assert {name: calls for name, calls in strange.items() if name not in NOT_IN_RUN_FOLDERS} == {}
    assert strange.keys() == NOT_IN_RUN_FOLDERS.keys()
