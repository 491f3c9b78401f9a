"""JSON in and out: request bodies within their limits, decoded against a struct; answers encoded by one encoder.

A body is read up to `body_limit_bytes` (413 beyond it, before a byte is read where its length is declared) and within
`BODY_TIMEOUT_S`. It is then decoded by msgspec against the struct of the route: bounded in depth by the decoder (it
raises RecursionError far below the C stack's end), with no memory beyond the values themselves, and every failure is
one `InvalidField` with the path of the field, `messages[0].role`.

A small body is decoded where it is, and once more as an object of raw values, for the names of fields that nobody
reads. One above `INLINE_BYTES` is decoded in a thread and once only. The decoder lets no other thread run meanwhile, so
the thread alone would not keep the loop moving: what takes time is the number of values, and of lists
and objects most of all: both are bounded first.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from homeserve.errors import BodyTooLarge, InvalidField

BODY_TIMEOUT_S = 60.0
INLINE_BYTES = 64 << 10
VALUES_LIMIT = 1 << 19
"""Most commas of a body. A text with more is longer than any context here; so are token ids, but for large batches."""
CONTAINERS_LIMIT = 1 << 17
"""Most opening brackets and braces of a body: a list costs far more than a number, and `[[[[` has no comma."""
IGNORED_NAMES_LIMIT = 256
"""Names of ignored fields that are remembered, so that each is logged once; later ones are not logged."""
_NAME_LOG_LEN = 64

_T = TypeVar("_T", bound=msgspec.Struct)
_log = logging.getLogger("homeserve.server")
_names = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
_WHERE = re.compile(r"^(?P<what>.*?) - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")


def encode(value: object) -> bytes:
    """JSON bytes of plain values and structs."""
    return _encoder.encode(value)


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(value), status=status, headers=headers, content_type="application/json")


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge, or InvalidField for one that does not arrive or is broken on the wire."""
    too_large = BodyTooLarge(f"the body is larger than {limit_bytes} bytes (--body-limit-bytes)", field="body")
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except TimeoutError:
        raise InvalidField("body", f"did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except web.RequestPayloadError as error:
        raise InvalidField("body", f"is broken: {error}") from None


class BodyDecoder:
    """Decodes bodies and remembers which unknown fields it has told about."""

    def __init__(self) -> None:
        self._ignored: set[tuple[str, str]] = set()

    async def read(self, body: bytes, kind: type[_T]) -> _T:
        """`decode`, off the loop where the body is large."""
        if len(body) <= INLINE_BYTES:
            return self.decode(body, kind)
        return await asyncio.to_thread(self.decode, body, kind)

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        """A `kind` from JSON bytes. Unknown fields are ignored; those of a small body are logged, each once. Raises
        InvalidField."""
        large = len(body) > INLINE_BYTES
        if large and body.count(b",") > VALUES_LIMIT:
            raise InvalidField("body", f"has more than {VALUES_LIMIT} values")
        if large and body.count(b"[") + body.count(b"{") > CONTAINERS_LIMIT:
            raise InvalidField("body", f"has more than {CONTAINERS_LIMIT} lists and objects")
        try:
            names = {} if large else _names.decode(body)
            value = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise _invalid(str(error)) from None
        except msgspec.DecodeError as error:
            raise InvalidField("body", f"is not JSON: {error}") from None
        except RecursionError:
            raise InvalidField("body", "is nested too deeply") from None
        except UnicodeDecodeError:
            raise InvalidField("body", "is not UTF-8") from None
        self._tell_ignored(names, kind)
        return value

    def tell_ignored(self, kind: str, name: str) -> None:
        """Log, once for each, that this `name` (a field, a type of tool) of a request is not used here."""
        told = (kind, name[:_NAME_LOG_LEN])
        if told not in self._ignored and len(self._ignored) < IGNORED_NAMES_LIMIT:
            self._ignored.add(told)
            _log.info("%s %r of a request is not used here and was ignored", *told)

    def _tell_ignored(self, names: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> None:
        for name in names.keys() - set(kind.__struct_encode_fields__):
            self.tell_ignored("field", name)


def _invalid(message: str) -> InvalidField:
    """msgspec's message, `Expected X - at `$.path``, as an InvalidField of that path."""
    found = _WHERE.match(message)
    what, path = (found["what"], found["path"]) if found else (message, "")
    missing = _MISSING.match(what)
    if missing:
        path, what = f"{path}.{missing['name']}".lstrip("."), "is required"
    return InvalidField(path or "body", what[:1].lower() + what[1:])


HANDED_ON_LIMIT = 4096
"""Values in what is handed on as it is (tools, template arguments)."""


def depth_of(value: Any, limit: int) -> bool:
    """Whether `value` (lists and dicts) is nested at most `limit` levels deep and has at most `HANDED_ON_LIMIT` values
    in each; walks no further than that."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return True
        if len(inner) > HANDED_ON_LIMIT:
            return False
        level = inner
    return False
