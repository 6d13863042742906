"""Start a node: `python -m tinkermq.actors.node --nats URL [--name NAME]
[--slots N | --cpu-slots N | --gpus 0,1]`."""

import os
import sys
from collections.abc import Sequence

from ...schemas.wire.subjects import token
from ..gpus import find_gpus
from ..runtime import ActorContext, run_service_actor, service_parser
from .machine import check_slots, default_name, default_slots, lock_name, package_versions
from .node import Node


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node until it is stopped; return the exit code."""
    parser = service_parser("node")
    parser.add_argument("--name", default=default_name(), help="name (default: the host's)")
    parser.add_argument(
        "--slots",
        type=int,
        help="CPU shares to offer instead of GPUs, which actors then do not see",
    )
    parser.add_argument(
        "--cpu-slots",
        type=int,
        help="CPU shares to offer if there is no GPU (default: one per core)",
    )
    parser.add_argument(
        "--link", default="", help="name of a fast network shared with nodes that name the same"
    )
    parser.add_argument(
        "--gpus",
        help="GPUs to offer, such as 0,2,3, GPU-…, MIG-… or 0:1 (default: those of "
        "CUDA_VISIBLE_DEVICES, or all)",
    )
    arguments = parser.parse_args(argv)

    async def run(context: ActorContext) -> None:
        token(arguments.name, what="node name")
        with lock_name(arguments.name, arguments.nats):
            context.set_state("working")
            check_slots(arguments.slots, arguments.gpus)
            if arguments.slots:
                os.environ["CUDA_VISIBLE_DEVICES"] = ""  # actors inherit it
            gpus = find_gpus(arguments.gpus)
            slots = arguments.slots or arguments.cpu_slots or default_slots()
            node = Node(
                context.broker,
                arguments.name,
                slots,
                gpus=gpus,
                link=arguments.link,
                packages=package_versions(),
            )
            await node.run(context.service, context.stopping)

    return run_service_actor("node", arguments.name, arguments.nats, run)


if __name__ == "__main__":
    sys.exit(main())
