"""Errors as Anthropic's API writes them: on `/v1/messages`, and on everything below it, whoever raised them.

Its clients choose their exception by the status, and tell people `error.type` and `error.message`. They know no `param`
and no `code`: the message begins with the field's path where there is one, in the same spelling as on every other route
(`messages[0].content[1].text`).
"""

from __future__ import annotations

from typing import Any

from homeserve.errors import ContextOverflow, RequestError

MESSAGES = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    507: "api_error",
    529: "overloaded_error",
}
"""By status; any other one is an `invalid_request_error`."""


def is_messages(path: str) -> bool:
    """Whether errors at `path` have Anthropic's shape."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def messages_error(error: RequestError, request_id: str) -> dict[str, Any]:
    """The body of an error, which is also the data of a stream's `error` event."""
    told = {"type": _TYPES.get(error.status, "invalid_request_error"), "message": _message(error)}
    return {"type": "error", "error": told, "request_id": request_id}


def _message(error: RequestError) -> str:
    """Agents read in these words, and in no field, that they have to shorten the conversation."""
    if not isinstance(error, ContextOverflow):
        return error.message
    tokens, limit = error.prompt_tokens, error.limit_tokens
    return f"prompt is too long: {tokens} tokens > {limit} maximum; {error.message}"
