"""What bounds a visitor: connections and their deadlines, bodies, requests at a time."""

from .bodies import MAX_INFERENCE_BYTES, MAX_PROGRAM_BYTES, max_body_bytes
from .connections import MAX_CONNECTIONS, Connections, give_connection_to
from .shares import MAX_RUNNING, Share

__all__ = [
    "MAX_CONNECTIONS",
    "MAX_INFERENCE_BYTES",
    "MAX_PROGRAM_BYTES",
    "MAX_RUNNING",
    "Connections",
    "Share",
    "give_connection_to",
    "max_body_bytes",
]
