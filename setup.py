"""Give the package's index README.md with absolute links; all else stands in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACE = f"{PROJECT['urls']['Repository']}/%s/v{PROJECT['version']}/"
LINK = re.compile(r'(\]\(|(?:src|href)="|^\[[^\]]+\]: )(?!\w+:|//)([^)\s"]+)', re.MULTILINE)


def absolute(link: re.Match[str]) -> str:
    """Return a link of README.md as one into the release's tag."""
    opening, target = link.groups()
    is_picture = Path(target).suffix in {".png", ".svg", ".webp"}
    page = f"README.md{target}" if target.startswith("#") else target
    return opening + PLACE % ("raw" if is_picture else "blob") + page


setup(
    long_description=LINK.sub(absolute, (ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
