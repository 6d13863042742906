"""A client is light: no torch, no parquet reader, little memory."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "vllm", "pyarrow", "matplotlib", "wandb", "tensorboard")
MODULES = (
    "tinkermq.clients",
    "tinkermq.clients.scheduler_client",
    "tinkermq.clients.service_client",
    "tinkermq.clients.hosting.game_environment",
    "tinkermq.clients.hosting.publish",
    "tinkermq.clients.cli",
    "tinkermq.clients.cli.runs.train",
    "tinkermq.clients.cli.pool.supervisor",
    "tinkermq.envs.serving.host",
    "tinkermq.broker.observe.tracking",
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
