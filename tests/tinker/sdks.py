"""The environments with Tinker's SDK that `make tinker` installs, and programs that run in them."""

import asyncio
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tinkermq.schemas.local.process import die_with

SDKS = Path(__file__).parents[2] / ".tinker"
PROGRAMS = Path(__file__).parent / "programs"
BASE = "org/tiny"
_PATIENCE_S = 150.0


def lacking(sdk: str) -> str:
    """Return what keeps an environment from being used; empty: nothing."""
    if (SDKS / f"{sdk}.stamp").exists():
        return ""
    return f"the {sdk} SDK is not installed: make tinker TINKER={sdk}"


@dataclass(frozen=True)
class SdkProgram:
    """A program that runs with an SDK, told nothing but where the service is and a key."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @classmethod
    def start(
        cls, sdk: str, url: str, folder: Path, *words: str, key: str = "tml-anybody"
    ) -> "SdkProgram":
        """Run the interpreter of an environment with these words in a folder."""
        log = folder / f"{Path(words[words[0] == '-m']).name}-{os.urandom(3).hex()}.log"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TINKER_BASE_URL": f"{url}/tinker",
            "TINKER_API_KEY": key,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(SDKS / sdk / "bin" / "python"), "-W", "ignore", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with(os.getpid()),
            )
        return cls(process, log)

    @property
    def told(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    async def failed(self) -> str:
        """Return what it has printed once it has ended with an error."""
        code, told = await self._ended()
        assert code != 0, told
        return told

    async def done(self, patience_s: float = _PATIENCE_S) -> str:
        """Return what it has printed once it has ended well."""
        code, told = await self._ended(patience_s)
        assert code == 0, told
        return told

    async def _ended(self, patience_s: float = _PATIENCE_S) -> tuple[int, str]:
        try:
            code = await asyncio.to_thread(self.process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end:\n{self.told}") from None
        return code, self.told
