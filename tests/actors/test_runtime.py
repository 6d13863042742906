"""What every actor has in common: signals, exit codes, failures, debug mode."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tinkermq.actors.runtime import EXIT_CRASHED, EXIT_FAILED, Repeats
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.wire.errors import ConfigError, root_cause

from tests.support.waiting import PATIENCE_S

PROGRAM = """
import asyncio, sys, time
from tinkermq.actors.runtime import run_service_actor
from tinkermq.schemas.wire.errors import BrokerError, ConfigError

async def main(context):
{body}

sys.exit(run_service_actor("probe", "probe-1", sys.argv[1], main))
"""


def start(broker: Broker, tmp_path: Path, body: str, **environment: str) -> subprocess.Popen[str]:
    """Start an actor whose work is `body`, with its log in a pipe."""
    program = tmp_path / "actor.py"
    program.write_text(PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    ")))
    return subprocess.Popen(
        [sys.executable, str(program), broker.url],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TINKERMQ_LOG_FORMAT": "json", **environment},
    )


def log_of(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    """Wait for the process and return its JSON log lines."""
    _, text = process.communicate(timeout=PATIENCE_S)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def wait_for_line(process: subprocess.Popen[str], event: str) -> None:
    """Read the log until an event shows."""
    assert process.stderr is not None
    for line in process.stderr:
        if event in line:
            return
    raise AssertionError(f"the log ended without {event}")


async def test_an_actor_that_returns_exits_with_0(broker: Broker, tmp_path: Path) -> None:
    process = start(broker, tmp_path, "context.log.info('work_done')")
    assert [line["event"] for line in log_of(process)] == ["work_done"]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, "lo"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1", "NCCL_SOCKET_IFNAME": "ib0"}, "ib0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "none"),
    ],
)
async def test_nccl_is_given_the_interface_to_the_broker_before_an_actor_makes_a_group(
    broker: Broker, tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    work = "import os; context.log.info(os.environ.get('NCCL_SOCKET_IFNAME', 'none'))"
    process = start(broker, tmp_path, work, **environment)
    assert [line["event"] for line in log_of(process)] == [expected]


async def test_a_mistake_of_the_users_is_final_and_says_what_to_do(
    broker: Broker, tmp_path: Path
) -> None:
    process = start(broker, tmp_path, "raise ConfigError('lr is -1', hint='set lr above 0')")
    (line,) = log_of(process)
    assert process.returncode == EXIT_FAILED
    assert line["event"] == "actor_failed"
    assert (line["message"], line["hint"]) == ("lr is -1", "set lr above 0")


@pytest.mark.parametrize("raised", ["BrokerError('gone')", "ValueError('a bug')"])
async def test_anything_else_is_a_crash_to_be_restarted(
    broker: Broker, tmp_path: Path, raised: str
) -> None:
    process = start(broker, tmp_path, f"raise {raised}")
    log_of(process)
    assert process.returncode == EXIT_CRASHED


async def test_sigterm_lets_the_actor_finish(broker: Broker, tmp_path: Path) -> None:
    body = """
        context.log.info("started")
        await context.stopping.wait()
        await asyncio.sleep(0.2)
        context.log.info("finished")
    """
    process = start(broker, tmp_path, body)
    wait_for_line(process, "started")
    process.send_signal(signal.SIGTERM)
    events = [line["event"] for line in log_of(process)]
    assert events == ["actor_draining", "finished"]
    assert process.returncode == 0


async def test_a_wait_that_comes_to_none_is_told_from_one_that_was_stopped(
    broker: Broker, tmp_path: Path
) -> None:
    body = """
        assert await context.unless_stopping(asyncio.sleep(0), stopped="stopped") is None
        context.stopping.set()
        assert await context.unless_stopping(asyncio.sleep(60), stopped="stopped") == "stopped"
    """
    process = start(broker, tmp_path, body)
    log_of(process)
    assert process.returncode == 0


async def test_a_second_sigterm_ends_at_once(broker: Broker, tmp_path: Path) -> None:
    process = start(broker, tmp_path, "context.log.info('started')\nawait asyncio.sleep(60)")
    wait_for_line(process, "started")
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "actor_draining")
    process.send_signal(signal.SIGTERM)
    assert log_of(process)[-1]["event"] == "actor_stopped_at_once"
    assert process.returncode == EXIT_CRASHED


async def test_the_debug_mode_reports_a_blocked_event_loop(broker: Broker, tmp_path: Path) -> None:
    body = "asyncio.get_running_loop().call_soon(time.sleep, 0.12)\nawait asyncio.sleep(0.3)"
    process = start(broker, tmp_path, body, TINKERMQ_DEBUG="1")
    _, text = process.communicate(timeout=PATIENCE_S)
    (blocked,) = (line for line in text.splitlines() if "sleep" in line)
    took = re.search(r"took ([\d.]+) seconds", blocked)
    assert took is not None
    assert float(took[1]) >= 0.12


async def test_without_the_debug_mode_a_blocked_event_loop_is_silent(
    broker: Broker, tmp_path: Path
) -> None:
    body = "asyncio.get_running_loop().call_soon(time.sleep, 0.12)\nawait asyncio.sleep(0.3)"
    process = start(broker, tmp_path, body)
    assert process.communicate(timeout=PATIENCE_S)[1] == ""


def test_an_unreachable_broker_is_told_with_its_url(tmp_path: Path) -> None:
    code = "from tinkermq.broker.client.connection import connect; import asyncio; "
    code += "asyncio.run(connect("
    code += "'nats://127.0.0.1:9', name='x', deadline_s=0.5))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode != 0
    assert "nats://127.0.0.1:9" in process.stderr


def test_the_root_cause_of_a_group_is_the_error_that_was_raised_on_purpose() -> None:
    ours = ConfigError("ours")
    group = ExceptionGroup("outer", [KeyError("x"), ExceptionGroup("inner", [ours])])
    assert root_cause(ExceptionGroup("single", [ours])) is ours
    assert isinstance(root_cause(group), KeyError)


def test_what_repeats_is_reported_at_each_doubling_and_other_texts_are_not_held_back() -> None:
    repeats = Repeats()
    assert [repeats.due("no rule") for _ in range(9)] == [1, 2, 0, 4, 0, 0, 0, 8, 0]
    assert repeats.due("another") == 1
