"""The signed answers that nats-server takes from an auth callout, in its own form of JWT.

Header, claims and an ed25519 signature by an nkey, each in base64url; see the server's
documentation of auth callout. What the server sends is read unchecked: nobody else can publish on
the callout's subject.
"""

import base64
import json
import time
import uuid
from typing import Any, NamedTuple, cast

import nkeys

from ...broker.users.credentials import ACCOUNT
from ...broker.users.permissions import Permissions
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import MessageError

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_UNLIMITED = {"data": -1, "payload": -1}


class LoginRequest(NamedTuple):
    """What nats-server tells of somebody who wants in."""

    server: str
    """Id of the server."""
    nkey: str
    """The key under which the server files this connection."""
    user: str
    password: str
    address: str
    """Host it comes from."""
    client: str
    """Name that the client gave itself."""


def read_request(token: bytes) -> LoginRequest:
    """Read the server's request; raises MessageError."""
    try:
        nats = cast("dict[str, Any]", read_json(_unpacked(token.split(b".")[1]))["nats"])
        options, info = nats["connect_opts"], nats.get("client_info", {})
        return LoginRequest(
            server=nats["server_id"]["id"],
            nkey=nats["user_nkey"],
            user=_text(options.get("user"))[:64],
            password=_text(options.get("pass")),
            address=_text(info.get("host"))[:64],
            client=_text(options.get("name"))[:64],
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise MessageError(f"the server's request cannot be read: {error!r}") from error


class ClaimIssuer:
    """Signs answers in the name of the pool's accounts."""

    def __init__(self, seed: str) -> None:
        """`seed` is that of the account key which the server's configuration names."""
        self._pair = nkeys.from_seed(bytearray(seed.encode()))
        self._public = self._pair.public_key.decode()

    def admit(
        self, request: LoginRequest, name: str, permissions: Permissions, expires: float | None
    ) -> bytes:
        """Return the answer that lets a connection in, until `expires`."""
        claims: dict[str, Any] = {
            "sub": request.nkey,
            "aud": ACCOUNT,
            "name": name,
            "nats": {
                "type": "user",
                "version": 2,
                "subs": permissions.max_subscriptions,
                **_UNLIMITED,
                **permissions.claims(),
            },
        }
        if expires is not None:
            claims["exp"] = int(expires)
        return self._answer(request, jwt=self._signed(claims))

    def refuse(self, request: LoginRequest, why: str) -> bytes:
        """Return the answer that keeps a connection out; the server logs `why`."""
        return self._answer(request, error=why)

    def _answer(self, request: LoginRequest, **nats: str) -> bytes:
        claims = {
            "sub": request.nkey,
            "aud": request.server,
            "nats": {"type": "authorization_response", "version": 2, **nats},
        }
        return self._signed(claims).encode()

    def _signed(self, claims: dict[str, Any]) -> str:
        stamped = {
            "jti": uuid.uuid4().hex,
            "iat": int(time.time()),
            "iss": self._public,
            **claims,
        }
        text = b".".join(_packed(json.dumps(part).encode()) for part in (_HEADER, stamped))
        return (text + b"." + _packed(self._pair.sign(text))).decode()


def _text(value: object) -> str:
    """Return what a client says of himself as printable text; it may be anything."""
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text)


def _packed(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _unpacked(data: bytes) -> bytes:
    return base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4))
