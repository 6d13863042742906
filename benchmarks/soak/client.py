"""A user's program that hosts a game for one job: `python -m benchmarks.soak.client URL`."""

import signal
import sys
import threading

from tinkermq.clients import GameEnvironment
from tinkermq.schemas.wire.errors import BrokerError, DeadlineError

from tests.support.games import SlowGuess

NUM_VAL = 4
_LOOK_S = 1.0


def main(server_url: str) -> int:
    """Host the game until SIGTERM; a broker that is away while this starts is waited for."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    environment = GameEnvironment(SlowGuess, {"env": {"num_val": NUM_VAL}})
    hosts = False
    while not over.wait(_LOOK_S):
        environment.check()
        if not hosts:
            try:
                environment.setup(server_url)
                hosts = True
            except (BrokerError, DeadlineError) as error:
                print(f"not yet: {error}", flush=True)
    environment.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
