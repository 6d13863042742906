"""Sealed boxes: anybody can close one to a public key, only its owner can open it (X25519)."""

from nacl.exceptions import CryptoError
from nacl.public import PrivateKey, PublicKey, SealedBox

from ...schemas.secret import JobSecrets
from ...schemas.wire.errors import AuthError, MessageError

__all__ = ["Seal", "close_seal"]


class Seal:
    """A private key that opens what was sealed to its public one."""

    def __init__(self, private: bytes) -> None:
        """Take 32 secret bytes."""
        self._key = PrivateKey(private)

    @property
    def public(self) -> bytes:
        """What clients seal to."""
        return bytes(self._key.public_key)

    def open(self, sealed: bytes, user: str) -> JobSecrets:
        """Return what a user has sealed.

        Raises AuthError, without telling what is in it, for what nobody has sealed to this key
        or somebody else has sealed.
        """
        try:
            secrets = JobSecrets.from_bytes(SealedBox(self._key).decrypt(sealed))
        except (CryptoError, MessageError):
            raise _unreadable() from None
        if secrets.user != user:
            raise _unreadable()
        return secrets


def close_seal(public: bytes, secrets: JobSecrets) -> bytes:
    """Return secrets that only the owner of the key can open."""
    return SealedBox(PublicKey(public)).encrypt(secrets.to_bytes())


def _unreadable() -> AuthError:
    return AuthError(
        "these secrets were not sealed to this pool's key",
        hint="hand them over again: the key is new when a scheduler without credentials starts",
    )
