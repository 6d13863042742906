"""Somebody with an API key who does too much of something: a process of its own, run by tests.

It speaks the protocol of NATS over plain sockets, as fast as the machine lets it, and goes on until
it is ended: `python flooding.py publish HOST PORT KEY SUBJECT BYTES`, or
`python flooding.py connect HOST PORT KEY CONNECTIONS`.
"""

import json
import selectors
import socket
import sys
from typing import Any

_BATCH = 512


def hello(key: str) -> bytes:
    """Return what opens a connection with a key."""
    user = "job" if key.startswith(("tmqj.", "tmqe_")) else key.split("_")[1]
    options = {"user": user, "pass": key, "verbose": False, "headers": True}
    return b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n"


def opened(host: str, port: int, key: str) -> socket.socket:
    """Return a connection of somebody who was let in."""
    connection = socket.create_connection((host, port))
    connection.sendall(hello(key))
    said = b""
    while b"PONG" not in said:
        more = connection.recv(65536)
        if not more or b"-ERR" in more:
            raise ConnectionError(repr(said + more))
        said += more
    return connection


def publication(subject: str, reply: str, payload: bytes) -> bytes:
    """Return what publishes a request."""
    return f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"


def publish(host: str, port: int, key: str, subject: str, num_bytes: int) -> None:
    """Send requests without end; come back when shut out."""
    reply = f"_INBOX_{key.split('_')[1]}.flood"
    payload = b"\x81\xa1v\x01" if num_bytes < 4 else b"x" * num_bytes
    one = publication(subject, reply, payload)
    many = one * max(_BATCH // max(num_bytes >> 10, 1), 1)
    told = False
    while True:
        try:
            with opened(host, port, key) as connection:
                if not told:
                    print("in", flush=True)
                told = True
                connection.setblocking(False)
                _send_without_end(connection, many)
        except OSError:  # shut out: again
            continue


def _send_without_end(connection: socket.socket, many: bytes) -> None:
    """Send the same again and again, and answer the server's pings so that it has no complaint."""
    left = b""
    while True:
        try:
            said = connection.recv(1 << 16)
            if not said:
                raise ConnectionError("closed")
            if b"PING" in said:
                left += b"PONG\r\n"
        except BlockingIOError:
            pass
        left = left or many
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            selector = selectors.DefaultSelector()
            selector.register(connection, selectors.EVENT_WRITE | selectors.EVENT_READ)
            selector.select(1.0)
            selector.close()


def connect(host: str, port: int, key: str, num_connections: int) -> None:
    """Ask to be let in on many connections at once, and again on each that is closed."""
    selector = selectors.DefaultSelector()
    num_in = 0

    def again() -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((host, port))
        selector.register(connection, selectors.EVENT_WRITE)

    for _ in range(num_connections):
        again()
    while True:
        for chosen, _ in selector.select(1.0):
            connection: Any = chosen.fileobj
            try:
                if chosen.events == selectors.EVENT_WRITE:
                    connection.send(hello(key))
                    selector.modify(connection, selectors.EVENT_READ)
                    continue
                said = connection.recv(65536)
                if b"PONG" in said:
                    num_in += 1
                    if num_in == 1:
                        print("in", flush=True)
                if said and b"-ERR" not in said:
                    continue
            except OSError:
                pass
            selector.unregister(connection)
            connection.close()
            again()


if __name__ == "__main__":
    what, host, port, key, *rest = sys.argv[1:]
    if what == "publish":
        publish(host, int(port), key, rest[0], int(rest[1]))
    else:
        connect(host, int(port), key, int(rest[0]))
