"""The users of a pool with authentication: what admins see and change, and what users see of it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...broker.calls import all_users, ask_users
from ...schemas.user import (
    AddUser,
    AuditList,
    AuditRecord,
    AuditRequest,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserList,
    UserReply,
)
from ...schemas.wire.errors import NotFoundError, StateError
from ...schemas.wire.message import Empty, Message
from .operations import body_of
from .pages.render import render
from .sessions import Visitor
from .web import Json, form_of, gateway_of, json_of, number_in, visitor_of

_AUDIT_SHOWN = 500


REQUESTS: dict[str, tuple[type[Message], type[Message]]] = {
    "add": (AddUser, NewKey),
    "rotate": (RotateKey, NewKey),
    "revoke": (NameUser, UserReply),
    "quota": (SetQuota, UserReply),
}
"""What can be done, by name: what is asked, which is the body of the request, and the answer."""


async def change(visitor: Visitor, action: str, fields: dict[str, Any]) -> Message:
    """Do one of `REQUESTS`; raises MessageError for a malformed request."""
    if action not in REQUESTS:
        known = ", ".join(REQUESTS)
        raise NotFoundError(f"{action!r} cannot be done to a user", hint=f"there are {known}")
    request, reply = REQUESTS[action]
    return await ask_users(visitor.broker, action, body_of(request, fields), reply)


def _check_keys(request: Request) -> None:
    if not gateway_of(request).sessions.with_keys:
        raise StateError(
            "this pool has no users: its broker asks for no keys",
            hint="make some with `tinkermq init`",
        )


async def page(request: Request) -> Response:
    """Show the visitor's own record; to an admin all users and what was written down last."""
    _check_keys(request)
    return await _page(request, await visitor_of(request), None)


async def _page(request: Request, visitor: Visitor, made: NewKey | None) -> Response:
    me = (await ask_users(visitor.broker, "me", Empty(), UserReply)).user
    shown: dict[str, Any] = {"user": visitor.user, "me": me, "made": made}
    shown |= {"users": [], "audit": []}
    if me.role == "admin":
        shown["users"] = await all_users(visitor.broker)
        audit = AuditRequest(limit=_AUDIT_SHOWN)
        records = (await ask_users(visitor.broker, "audit", audit, AuditList)).records
        shown["audit"] = [one for one in records if not _is_look(one)]
    return render(request, "users.html", shown)


def _is_look(record: AuditRecord) -> bool:
    """Whether an admin only looked, as this page does each time."""
    return record.what in ("users.list", "users.audit") and record.outcome == "done"


async def form(request: Request) -> Response:
    """Do what a form says; a new key is shown once, on the page that answers."""
    _check_keys(request)
    visitor, fields = await visitor_of(request), await form_of(request)
    given: dict[str, Any] = {name: value for name, value in fields.items() if value != ""}
    reply = await change(visitor, request.path_params["action"], given)
    made = reply if isinstance(reply, NewKey) else None
    if made is not None and made.user == visitor.user:
        return render(request, "users.html", {"user": visitor.user, "me": None, "made": made})
    return await _page(request, visitor, made)


async def list_users(request: Request) -> Response:
    """Answer with all users."""
    _check_keys(request)
    visitor = await visitor_of(request)
    return Json(UserList(users=await all_users(visitor.broker)))


async def change_user(request: Request) -> Response:
    """Do what the end of the path says; answers with the user, or the new key."""
    _check_keys(request)
    visitor, action = await visitor_of(request), request.url.path.rpartition("/")[2]
    return Json(await change(visitor, action, await json_of(request)))


async def read_audit(request: Request) -> Response:
    """Answer with what was written down last."""
    _check_keys(request)
    limit = number_in(request, "limit", 200, least=1) or 200
    asked, visitor = AuditRequest(limit=min(limit, 2000)), await visitor_of(request)
    return Json(await ask_users(visitor.broker, "audit", asked, AuditList))


def routes() -> list[Route]:
    """Return the routes of the page."""
    return [Route("/users", page), Route("/users/{action}", form, methods=["POST"])]
