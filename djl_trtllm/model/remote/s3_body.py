"""The body of an object that S3 sends, read into a buffer."""

from __future__ import annotations

from http.client import HTTPException
from types import TracebackType
from typing import Any


class Body:
    """Reads botocore's body of an answer; as a context it gives the connection back for other requests.

    The `readinto` of botocore and of urllib3 allocate memory for each read and copy it. This calls the one of
    http.client's response below them, which botocore reaches for in the same way, to set a timeout.
    """

    def __init__(self, body: Any) -> None:
        self._answer = body.__enter__()
        self._source = self._answer._fp

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer, or its beginning where the body or the connection ends. Raises ConnectionError."""
        try:
            return int(self._source.readinto(buffer))
        except (OSError, HTTPException) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._source.isclosed():
            # The rest of the body is still to come: another request on this connection would read it as its answer.
            self._answer.close()
        self._answer.release_conn()
