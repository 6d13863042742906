"""A node whose actors are toys: `toy_node.py --nats URL --name NAME --slots N`."""

import sys
from pathlib import Path

from tinkermq.actors.node.children import programs
from tinkermq.actors.node.machine import lock_name
from tinkermq.actors.node.node import Node
from tinkermq.actors.runtime import ActorContext, run_service_actor, service_parser
from tinkermq.schemas.node import WantedActor


def toy_command(wanted: WantedActor) -> list[str]:
    """Start a toy instead of the real actor."""
    toy = Path(__file__).with_name("toy_actor.py")
    return [sys.executable, "-S", str(toy), wanted.run_dir, wanted.name]


def main() -> int:
    parser = service_parser("node")
    parser.add_argument("--name", required=True)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()

    async def run(context: ActorContext) -> None:
        with lock_name(arguments.name, arguments.nats):
            node = Node(
                context.broker, arguments.name, arguments.slots, start=programs(toy_command)
            )
            await node.run(context.service, context.stopping)

    return run_service_actor("node", arguments.name, arguments.nats, run)


if __name__ == "__main__":
    sys.exit(main())
