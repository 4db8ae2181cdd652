"""Stateful sessions in requests: SageMaker's headers, and bodies that open or close a session.

{"requestType": "NEW_SESSION"}       opens one: X-Amzn-SageMaker-New-Session-Id is in the response
X-Amzn-SageMaker-Session-Id: ID      the request belongs to a session; NEW_SESSION opens one for it
{"requestType": "CLOSE"}             closes the session of the header
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NamedTuple

from djl_trtllm.api import RawRequest, Reply
from djl_trtllm.api.json_body import SMALL
from djl_trtllm.errors import InvalidRequestError, SessionError
from djl_trtllm.service.sessions import Session, Sessions

_SESSION = "x-amzn-sagemaker-session-id"
_NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
_CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"
_NEW, _CLOSE = "NEW_SESSION", "CLOSE"
_TYPE = "requestType"
_PATH = "session_path"
"""Property with the folder of the session, for the model's own formatters."""


class SessionUse(NamedTuple):
    """A request in its session. `headers` are for the response. `reply` is the response, if nothing is generated."""

    request: RawRequest
    session: Session | None = None
    headers: tuple[tuple[str, str], ...] = ()
    reply: Reply | None = None


class SessionRequests:
    """`sessions` None: there are none, and requests that name one are refused."""

    def __init__(self, sessions: Sessions | None) -> None:
        self._sessions = sessions

    async def use(self, request: RawRequest, *, custom: bool = False) -> SessionUse:
        """Find, open or close the session of a request. `custom`: the model's own formatters read the body.

        Raises SessionError and OverloadedError.
        """
        identifier = request.properties.get(_SESSION, "").strip()
        kind = None if custom and self._sessions is None else _kind(request)
        if not identifier and kind is None:
            return SessionUse(request)
        if self._sessions is None:
            raise SessionError(
                f"Invalid payload. stateful sessions not enabled, {_TYPE} and {_SESSION} are not supported: set "
                "option.enable_stateful_sessions=true (SAGEMAKER_ENABLE_STATEFUL_SESSIONS)"
            )
        if kind is None and identifier == _NEW and not request.body.strip():
            kind = _NEW
        if kind is not None and request.path.endswith("-response-stream"):
            raise SessionError("a session is opened and closed by InvokeEndpoint, not by a response stream")
        if kind == _CLOSE:
            await asyncio.to_thread(self._sessions.close, identifier)
            return _replied(request, "closed", identifier, (_CLOSED_SESSION, identifier))
        if kind is None and identifier != _NEW:
            session = self._sessions.find(identifier)
            return SessionUse(_with_path(request, session), session)
        session = await asyncio.to_thread(self._sessions.create)
        header = (_NEW_SESSION, session.header)
        if kind == _NEW:
            return _replied(request, "created", session.id, header)
        return SessionUse(_with_path(request, session), session, (header,))

    async def undo(self, use: SessionUse) -> None:
        """Close the session that was opened for a request that is refused."""
        if use.headers and use.session is not None and self._sessions is not None:
            await asyncio.to_thread(self._sessions.close, use.session.id)


def _kind(request: RawRequest) -> str | None:
    """What the body asks for; None if it is no request about sessions, which are small. Raises SessionError."""
    if len(request.body) > SMALL or _TYPE.encode() not in request.body:
        return None
    try:
        payload = request.json
    except InvalidRequestError:
        return None
    if type(payload) is not dict or _TYPE not in payload:
        return None
    kind = payload[_TYPE]
    if kind not in (_NEW, _CLOSE) or len(payload) > 1:
        raise SessionError(f'a request with {_TYPE} is {{"{_TYPE}": "{_NEW}"}} or {{"{_TYPE}": "{_CLOSE}"}}')
    return str(kind)


def _replied(request: RawRequest, what: str, identifier: str, header: tuple[str, str]) -> SessionUse:
    reply = Reply.json({"result": f"Session {identifier} {what}"})._replace(headers=(header,))
    return SessionUse(request, reply=reply)


def _with_path(request: RawRequest, session: Session) -> RawRequest:
    return replace(request, properties={**request.properties, _PATH: str(session.path)})
