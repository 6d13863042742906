"""Requests about users, by admins and by users themselves. The sender is that of the subject."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats.aio.client import Client

from ...broker.client.keys import (
    api_key,
    id_of_invitation,
    invitation_code,
    is_same,
    key_hash,
)
from ...broker.client.rpc import Handler, RequestContext, Service
from ...broker.credentials import expiry
from ...broker.fair_queue import Rates
from ...broker.user_records import Audit, UserStore
from ...schemas.user import (
    BOUNDS,
    AddUser,
    AuditList,
    AuditRequest,
    Invitation,
    Invite,
    ListUsers,
    NameUser,
    NewKey,
    Register,
    RotateKey,
    SetQuota,
    UserInfo,
    UserList,
    UserRecord,
    UserReply,
)
from ...schemas.wire import errors
from ...schemas.wire.message import Empty, Message
from ...schemas.wire.subjects import rpc, user_name
from .callout import check_invitation
from .connections import disconnect_user

R = TypeVar("R")

PAGE_USERS = 500
"""Of one answer."""
ROTATIONS, ROTATIONS_S = 10, 1 / 60
"""How often a user may replace the own key: at once, and a second in the long run."""
_OWN_KICK_S = 1.0
_AGAIN_S = 120.0
"""For how long a request that makes a user is answered with the same key if it comes again."""
_DAY_S = 86_400


class UserRequests:
    """Answers on `rpc.<user>.users.<method>`."""

    def __init__(self, users: UserStore, audit: Audit, system: Client, secret: bytes) -> None:
        """Change `users`; close connections through the server's `system` account.

        Keys follow from the pool's `secret` and the id of the request that makes them.
        """
        self._users = users
        self._secret = secret
        self._audit = audit
        self._system = system
        self._kicks: set[asyncio.Task[int]] = set()
        self._rotations = Rates(ROTATIONS_S, ROTATIONS)

    async def open(self, service: Service) -> None:
        """Answer on the subjects of every user."""
        endpoints: list[tuple[str, type[Message], Handler]] = [
            ("add", AddUser, self._add),
            ("list", ListUsers, self._list),
            ("rotate", RotateKey, self._rotate),
            ("revoke", NameUser, self._revoke),
            ("quota", SetQuota, self._quota),
            ("invite", Invite, self._invite),
            ("audit", AuditRequest, self._read_audit),
            ("me", Empty, self._me),
        ]
        for method, model, handler in endpoints:
            await service.endpoint(method, rpc("*", "users", method), model, handler, fair=True)
        subject = rpc("invited", "users", "register")
        await service.endpoint("register", subject, Register, self._register, fair=True)

    async def _add(self, request: AddUser, context: RequestContext) -> NewKey:
        async def work() -> NewKey:
            user = user_name(request.user)
            key = api_key(user, self._secret, "add", context.user, request.request_id)
            record = _record(user, key, request.days, request.max_slots)
            record = record.model_copy(update={"role": request.role, "weight": request.weight})
            record = await self._create(record)
            return NewKey(secret=key, user=user, expires=record.expires)

        return await self._as_admin(context, "users.add", request.user, work)

    async def _list(self, request: ListUsers, context: RequestContext) -> UserList:
        async def work() -> UserList:
            users = [item for item in await self._users.list() if item.user > request.after]
            page = [_info(user) for user in users[:PAGE_USERS]]
            return UserList(users=page, more=len(users) > len(page))

        return await self._as_admin(context, "users.list", "", work)

    async def _rotate(self, request: RotateKey, context: RequestContext) -> NewKey:
        async def work() -> NewKey:
            known, now = await self._known(request.user), time.time()
            key = api_key(known.user, self._secret, "rotate", context.user, request.request_id)
            if known.revoked is None and is_same(known.key_hash, key_hash(key)):  # come again
                return NewKey(secret=key, user=known.user, expires=known.expires)

            def replace(record: UserRecord) -> UserRecord:
                if record.revoked is not None:
                    raise errors.StateError(
                        f"user {record.user} was revoked, which is for good",
                        hint="add a user of another name",
                    )
                update = {"key_hash": key_hash(key), "expires": expiry(now, request.days)}
                return record.model_copy(update=update)

            record = await self._users.change(request.user, replace)
            await self._shut_out(request.user, context)
            return NewKey(secret=key, user=record.user, expires=record.expires)

        return await self._as_admin(context, "users.rotate", request.user, work)

    async def _revoke(self, request: NameUser, context: RequestContext) -> UserReply:
        async def work() -> UserReply:
            if request.user == context.user:
                raise errors.StateError(
                    "an admin cannot revoke himself", hint="let another admin do it"
                )
            now = time.time()
            record = await self._users.change(
                request.user,
                lambda one: one.model_copy(update={"revoked": one.revoked or now}),
            )
            await self._shut_out(request.user, context)
            return UserReply(user=_info(record))

        return await self._as_admin(context, "users.revoke", request.user, work)

    async def _quota(self, request: SetQuota, context: RequestContext) -> UserReply:
        async def work() -> UserReply:
            parameters = {name: getattr(request, name) for name in BOUNDS}
            update: dict[str, object] = {
                name: None if value < 0 else value
                for name, value in parameters.items()
                if value is not None
            }
            if request.weight is not None:
                update["weight"] = request.weight
            if request.max_priority is not None:
                update["max_priority"] = request.max_priority
            record = await self._users.change(
                request.user, lambda one: one.model_copy(update=update)
            )
            return UserReply(user=_info(record))

        return await self._as_admin(context, "users.quota", request.user, work)

    async def _invite(self, request: Invite, context: RequestContext) -> NewKey:
        async def work() -> NewKey:
            number, code = invitation_code(self._secret, context.user, request.request_id)
            invitation = Invitation(
                code_hash=key_hash(code),
                uses_left=request.uses,
                expires=time.time() + request.days * _DAY_S,
                key_days=request.key_days,
                max_slots=request.max_slots,
            )
            try:
                await self._users.invite(number, invitation)
            except errors.ConflictError:
                known = await self._users.invitation(number)
                if known is None or not is_same(known.code_hash, invitation.code_hash):
                    raise
                invitation = known
            return NewKey(secret=code, expires=invitation.expires)

        return await self._as_admin(context, "users.invite", "", work)

    async def _register(self, request: Register) -> NewKey:
        """Make a user for one use of an invitation."""
        name = user_name(request.user)
        number = id_of_invitation(request.code)
        if number is None:
            raise errors.AuthError("this is no invitation", hint="ask an admin for one")
        key = api_key(name, self._secret, "register", request.code, request.request_id)
        if (known := await self._users.get(name)) is not None:
            if not _is_again(known, key_hash(key)):
                raise _taken(name)
            return NewKey(secret=key, user=name, expires=known.expires)

        def use(invitation: Invitation) -> Invitation:
            check_invitation(invitation, request.code)
            return invitation.model_copy(update={"uses_left": invitation.uses_left - 1})

        invitation = await self._users.change_invitation(number, use)
        record = await self._create(_record(name, key, invitation.key_days, invitation.max_slots))
        await self._audit.write(f"invitation {number}", "users.register", target=name)
        return NewKey(secret=key, user=name, expires=record.expires)

    async def _read_audit(self, request: AuditRequest, context: RequestContext) -> AuditList:
        async def work() -> AuditList:
            return AuditList(records=await self._audit.last(request.limit))

        return await self._as_admin(context, "users.audit", "", work)

    async def _me(self, _: Empty, context: RequestContext) -> UserReply:
        return UserReply(user=_info(await self._known(context.user)))

    async def _create(self, record: UserRecord) -> UserRecord:
        """Make a user; if the same request has made it before, return that one."""
        try:
            await self._users.create(record)
        except errors.ConflictError as error:
            known = await self._users.get(record.user)
            if known is None or not _is_again(known, record.key_hash):
                raise _taken(record.user) from error
            return known
        return record

    async def _known(self, user: str) -> UserRecord:
        record = await self._users.get(user)
        if record is None:
            raise errors.NotFoundError(f"there is no user {user!r}", hint="`tinkermq user list`")
        return record

    async def _as_admin(
        self,
        context: RequestContext,
        what: str,
        target: str,
        work: Callable[[], Awaitable[R]],
    ) -> R:
        """Do something that admins may do, and a user to himself if it is `rotate`."""
        try:
            caller = await self._known(context.user)
            own_key = what == "users.rotate" and target == context.user
            bounded = own_key and caller.role != "admin"
            if bounded and self._rotations.take(context.user, time.monotonic()) is None:
                raise errors.BusyError(
                    f"user {context.user!r} has replaced the own key {ROTATIONS} times just now",
                    hint="another time in some minutes; an admin is not bounded so",
                )
            if caller.revoked is not None or (caller.role != "admin" and not own_key):
                raise errors.AuthError(
                    f"user {context.user!r} may not do this ({what})", hint="ask an admin"
                )
            result = await work()
        except errors.TinkermqError as error:
            await self._audit.refused(context.user, what, error.message, target=target)
            raise
        await self._audit.write(context.user, what, target=target)
        return result

    async def _shut_out(self, user: str, context: RequestContext) -> None:
        """Close the connections that use the old key; the asker's own once it has its answer."""
        if user != context.user:
            await disconnect_user(self._system, user)
            return
        task = asyncio.create_task(self._kick_later(user), name=f"kick {user}")
        self._kicks.add(task)
        task.add_done_callback(self._kicks.discard)

    async def _kick_later(self, user: str) -> int:
        await asyncio.sleep(_OWN_KICK_S)
        return await disconnect_user(self._system, user)


def _is_again(known: UserRecord, key_hash: str) -> bool:
    """Whether a request has made this user already, a moment ago."""
    return is_same(known.key_hash, key_hash) and time.time() - known.created < _AGAIN_S


def _record(user: str, key: str, days: float, max_slots: int | None) -> UserRecord:
    now = time.time()
    return UserRecord(
        user=user,
        key_hash=key_hash(key),
        created=now,
        expires=expiry(now, days),
        max_slots=max_slots,
    )


def _info(record: UserRecord) -> UserInfo:
    return UserInfo(**record.model_dump(exclude={"key_hash"}))


def _taken(user: str) -> errors.ConflictError:
    return errors.ConflictError(
        f"there is a user {user!r} already",
        hint="choose another name; a new key for this one: `tinkermq user rotate`",
    )
