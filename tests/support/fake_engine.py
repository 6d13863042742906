"""A podman that writes down how it is called, and whose images are folders of this machine.

It takes the commands of podman and docker that are used, with the options that are used, and
refuses all others, as a contract: what it refuses, a real one need not take.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = """#!{python} -IS
import json, os, subprocess, sys
home, words = {home!r}, sys.argv[1:]
with open(f"{{home}}/calls.jsonl", "a") as file:
    file.write(json.dumps(words) + "\\n")
images = json.load(open(f"{{home}}/images.json"))

def end(code, text):
    print(text, file=sys.stderr if code else sys.stdout)
    sys.exit(code)

def known(name):
    return images[name] if name in images else end(1, f"no such image: {{name}}")

def keep(name, image):
    images[name] = image
    json.dump(images, open(f"{{home}}/images.json", "w"))

if words == ["info"]:
    end(0, "fine")
elif words[:2] == ["image", "inspect"] and len(words) == 3:
    image = known(words[2])
    end(0, json.dumps([{{"Id": "sha256:" + image["id"], "Config": image["config"]}}]))
elif words[0] == "pull" and len(words) == 2:
    if not words[1].startswith("registry/"):
        end(1, f"trying to pull...\\nmanifest of {{words[1]}} unknown")
    keep(words[1], images["base"])
    end(0, "pulled")
elif words[0] == "build" and words[1] == "--tag" and words[3] == "--file" and len(words) == 6:
    text = open(words[4]).read()
    if not os.path.samefile(os.path.dirname(words[4]), words[5]) or "FAIL" in text:
        end(1, "STEP 1\\nError: building at STEP FAIL")
    keep(words[2], images["base"])
    end(0, "built")
elif words[:3] == ["create", "--pull=never", "--network=none"] and words[4:] == ["/none"]:
    end(0, known(words[3])["root"].replace("/", "-"))
elif words[0] == "export" and len(words) == 2:
    root = next(one["root"] for one in images.values() if one["root"].replace("/", "-") == words[1])
    sys.exit(subprocess.run(["tar", "-C", root, "-c", "."]).returncode)
elif words[:2] == ["rm", "-f"] and len(words) == 3:
    end(0, words[2])
else:
    end(125, f"unknown command: {{words}}")
"""


class FakeEngine:
    """The podman of a folder that stands first in PATH."""

    def __init__(self, folder: Path, root: Path, config: dict[str, object]) -> None:
        """Write the program; what it pulls and builds has the files of `root`."""
        self.folder = folder
        folder.mkdir()
        python = Path(sys.executable).resolve()
        (folder / "podman").write_text(PROGRAM.format(python=python, home=str(folder)))
        (folder / "podman").chmod(0o755)
        base = {"id": folder.name.encode().hex() * 4, "root": str(root), "config": config}
        (folder / "images.json").write_text(json.dumps({"base": base}))

    def calls(self, name: str = "") -> list[list[str]]:
        """Return how it was called, all or one command."""
        file = self.folder / "calls.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        calls = [json.loads(line) for line in lines]
        return [words for words in calls if not name or words[0] == name]

    def remove(self) -> None:
        """Have no engine any more."""
        (self.folder / "podman").unlink()


def image_files(root: Path) -> Path:
    """Make the files of an image of this machine's shell and a few programs, with a mark."""
    (root / "app").mkdir(parents=True)
    (root / "app" / "of-the-image").write_text("image\n")
    (root / "etc").mkdir()
    (root / "etc" / "of-the-image").write_text("image\n")
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for name in ("bash", "sh", "cat", "ls", "env", "touch"):
        _with_libraries(Path(str(shutil.which(name))).resolve(), root, root / "usr/bin" / name)
    return root


def _with_libraries(program: Path, root: Path, target: Path) -> None:
    """Copy a program, and the libraries that it loads, to where it looks for them."""
    shutil.copy(program, target)
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        path = next((word for word in line.split() if word.startswith("/")), None)
        if path is not None:
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                shutil.copy(Path(path).resolve(), place)
