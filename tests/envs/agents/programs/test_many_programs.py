"""Many programs of one host at once: none is lost, none sees another, nothing is left of them."""

import asyncio

import pytest

from tests.envs.agents.programs.conftest import hosting

CODE = """
nonce = json.load(open(os.environ["TINKERMQ_TASK"]))["nonce"]
for _ in range(3):
    ask(nonce)
    open("seen", "a").write(nonce)
open(os.environ["TINKERMQ_REWARD"], "w").write(str(len(open("seen").read()) / len(nonce)))
print(nonce)
"""


@pytest.mark.long
async def test_sixty_four_programs_of_a_host_run_at_once():
    async with hosting(CODE, per_host=64) as host:

        async def play(number: int) -> None:
            nonce = f"nonce {number:03}"
            result = await host.play(f"t{number}-1", kwargs={"nonce": nonce})
            assert (result.reward, result.info["output"]) == (3.0, f"{nonce}\n")

        await asyncio.gather(*(play(number) for number in range(256)))
        assert len(host.endpoint.closed) == 256
