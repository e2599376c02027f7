"""Errors of requests."""

from http import HTTPStatus
from typing import Final

_REASONS: Final = {
    HTTPStatus.NOT_MODIFIED: "conditionNotMet",
    HTTPStatus.BAD_REQUEST: "invalid",
    HTTPStatus.UNAUTHORIZED: "required",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "notFound",
    HTTPStatus.CONFLICT: "conflict",
    HTTPStatus.PRECONDITION_FAILED: "conditionNotMet",
    HTTPStatus.TOO_MANY_REQUESTS: "rateLimitExceeded",
    HTTPStatus.SERVICE_UNAVAILABLE: "backendError",
}


class RefusedError(Exception):
    """A request that gets an error response, and changed nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def document(self) -> dict[str, object]:
        """Body of the response."""
        return error_document(self.status, str(self))


def error_document(status: int, message: str) -> dict[str, object]:
    """Returns the body of an error response."""
    reason = _REASONS.get(HTTPStatus(status), "backendError")
    detail = {"domain": "global", "reason": reason, "message": message}
    return {"error": {"code": status, "message": message, "errors": [detail]}}
