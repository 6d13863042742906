"""The notebooks of examples/ run from their first cell to their last, with a pool of their own."""

import json
import re
from pathlib import Path

import pytest

from tests.support.gateway import free_port
from tests.support.pages import ROOT, environment, run, succeed

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SHELL = "import subprocess\nfrom pathlib import Path\n"


def script(file: Path) -> str:
    """Return a notebook's code as one script; `!` and `%%writefile` do what they do in Jupyter."""
    parts = [SHELL]
    for cell in json.loads(file.read_text())["cells"]:
        assert not cell.get("outputs"), "a notebook is committed without outputs"
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            head, _, rest = text.partition("\n")
            if head.startswith("%%writefile "):
                text = f"Path({head.split()[1]!r}).write_text({rest!r})"
            parts.append(re.sub(r"^!(.+)$", _shell, text, flags=re.MULTILINE))
    return "\n".join(parts)


def _shell(line: re.Match[str]) -> str:
    return f"subprocess.run({line[1]!r}, shell=True, check=True)"


@pytest.mark.long
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_to_its_end(file: Path, tmp_path: Path) -> None:
    env = environment(tmp_path)
    broker, gateway = free_port(), free_port()
    code = script(file).replace(
        "up --slots", f"up --port {broker} --gateway-port {gateway} --slots"
    )
    code = code.replace("127.0.0.1:4222", f"127.0.0.1:{broker}")
    code = code.replace("127.0.0.1:8780", f"127.0.0.1:{gateway}")
    (tmp_path / "notebook.py").write_text(code)
    try:
        said = succeed("python notebook.py", tmp_path, env=env)
    finally:
        run("tinkermq down", tmp_path, env=env)
    for before, after in re.findall(r"^reward ([\d.]+) -> ([\d.]+)$", said, flags=re.MULTILINE):
        assert float(after) > float(before)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_valid_code_and_its_links_lead_somewhere(file: Path) -> None:
    compile(script(file), file.name, "exec")
    texts = ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"]]
    for target in re.findall(r"\]\(([^)#]+)\)", "\n".join(texts)):
        assert (file.parent / target).exists(), target
