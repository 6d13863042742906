"""What bounds a visitor: connections and their deadlines, bodies, requests at a time."""

from .bodies import MAX_INFERENCE_BYTES, MAX_PROGRAM_BYTES, max_body_bytes
from .connections import MAX_CONNECTIONS, Connections
from .shares import MAX_RUNNING, Share

__all__ = [
    "MAX_CONNECTIONS",
    "MAX_INFERENCE_BYTES",
    "MAX_PROGRAM_BYTES",
    "MAX_RUNNING",
    "Connections",
    "Share",
    "max_body_bytes",
]
