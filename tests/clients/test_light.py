"""A client is light: no torch, no parquet reader, little memory."""

import asyncio
import subprocess
import sys
from pathlib import Path

from tinkermq.broker.client.connection import Broker

HEAVY = ("torch", "transformers", "vllm", "pyarrow", "matplotlib", "wandb", "tensorboard")
MODULES = (
    "tinkermq.clients",
    "tinkermq.clients.scheduler_client",
    "tinkermq.clients.service_client",
    "tinkermq.clients.hosting.environments",
    "tinkermq.clients.hosting.publish",
    "tinkermq.clients.cli",
    "tinkermq.clients.cli.train",
    "tinkermq.clients.cli.supervisor",
    "tinkermq.envs.host",
    "tinkermq.broker.tracking",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_clients_import_nothing_heavy_and_need_less_than_100_megabytes() -> None:
    code = f"""
import importlib, pathlib, sys
for module in {MODULES}:
    importlib.import_module(module)
print([name for name in {HEAVY} if name in sys.modules])
status = pathlib.Path('/proc/self/status').read_text()
print(status.partition('VmHWM:')[2].split()[0])
"""
    heavy, kilobytes = run(code).splitlines()
    assert heavy == "[]"
    assert int(kilobytes) < 100 * 1024


def test_importing_the_package_alone_brings_no_broker_client() -> None:
    code = "import sys, tinkermq.clients.cli; print('nats' in sys.modules, 'rich' in sys.modules)"
    assert run(code).split() == ["False", "False"]


def test_every_exported_name_is_there() -> None:
    code = "import tinkermq.clients as c; print([getattr(c, n).__name__ for n in c.__all__])"
    assert "SchedulerClient" in run(code)


PS_NEEDS_NOT = (
    "aiohttp.client",  # nats-py's, for WebSockets
    "numpy",
    "pyarrow",
    "yaml",
    "tinkermq.schemas.config.job",
    "tinkermq.schemas.control",
    "tinkermq.schemas.tinker.operation",
)


async def test_ps_imports_only_what_it_uses(broker: Broker) -> None:
    code = f"""
import sys
from tinkermq.clients.cli import main
assert main(["ps", "--all", "--json", "--nats-url", {broker.url!r}]) == 0
print([name for name in {PS_NEEDS_NOT} if name in sys.modules])
"""
    assert (await asyncio.to_thread(run, code)).splitlines()[-1] == "[]"


def test_a_lazy_module_is_loaded_at_its_first_use_and_others_at_once(tmp_path: Path) -> None:
    for name in ("late", "prompt"):
        (tmp_path / f"{name}.py").write_text(f"print('{name}')\nvalue = 1\n")
    code = f"""
import gc, sys
from tinkermq.clients.cli.main import importing
sys.path.insert(0, {str(tmp_path)!r})
before = list(sys.meta_path)
with importing(frozenset({{"late", "not_there"}})):
    import late, prompt
    try:
        import not_there
    except ModuleNotFoundError:
        print("none")
    print(gc.isenabled())
print(late.value, gc.isenabled(), sys.meta_path == before)
"""
    assert run(code).splitlines() == ["prompt", "none", "False", "late", "1 True True"]


def test_a_command_imports_structlog_without_rich_and_has_rich_for_itself() -> None:
    code = """
import sys
from tinkermq.clients.cli.main import importing
with importing():
    import structlog
    print(structlog.dev.rich, "rich" in sys.modules)
    from rich.table import Table
print(Table.__name__, structlog.get_logger().warning("told"))
"""
    first, told, last = run(code).splitlines()
    assert first == "None False"
    assert "told" in told
    assert last == "Table None"
