"""Import every module of some packages of ours, in an environment that may lack others' packages.

`python imports.py schemas,actors.gateway clients.cli.agents`: packages, and modules to leave out.
Without any, all but what imports packages that only `tinkermq[worker]` and larger extras bring.
"""

import importlib
import pkgutil
import sys

ROOMS = "schemas,broker,envs,actors,clients"
OTHER_EXTRA = "envs.openenv_server"
"""Of the extra `openenv-server`, which brings gradio."""
WORKER = {"torch", "transformers", "safetensors", "peft", "gguf", "llguidance", "psutil"}
WORKER |= {"pynvml", "setproctitle", "pyrage", "vllm"}


def import_all(packages: list[str], left_out: set[str], may_lack: set[str]) -> list[str]:
    """Import all modules below some packages; return those that lack packages of `may_lack`."""
    lacking: list[str] = []
    names = [f"tinkermq.{name}" for name in packages]
    while names:
        name = names.pop()
        if name.removeprefix("tinkermq.") in left_out:
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in may_lack:
                raise
            lacking.append(name)
        else:
            below = pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}.")
            names += [found.name for found in below]
    return lacking


if __name__ == "__main__":
    chosen, left_out = sys.argv[1:] or (ROOMS, OTHER_EXTRA)
    may_lack = set[str]() if sys.argv[1:] else WORKER
    lacking = import_all(chosen.split(","), set(left_out.split(",")), may_lack)
    count = sum(name.startswith("tinkermq.") for name in sys.modules)
    print(f"Python {sys.version.split()[0]}: {count} modules; {len(lacking)} need torch")
