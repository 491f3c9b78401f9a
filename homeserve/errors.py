"""The error tree. A name says what is wrong, facts are attributes, the message is built from them and says what to do.

    HomeserveError                      message, code, field, fix
    ├── SettingError                    exit 2 · a flag, variable or homeserve.toml entry that cannot be used
    ├── ModelError                      exit 2 · a model that cannot be found, read or run
    │   ├── ModelNotFound               no such file, folder, alias or repository
    │   ├── InvalidModelFile            a file that is not what it says: truncated, hostile, damaged
    │   ├── UnknownArchitecture         with the list of known ones
    │   └── UnsupportedModel            known, but this backend lacks an op or a quant type (every missing one is named)
    ├── DeviceError                     exit 2 · a card, its driver or its compiler that cannot be used
    ├── BudgetError                     exit 2 · the plan does not fit, with the arithmetic
    ├── FetchError                      exit 2 · a download that failed: network, digest, disk, permission
    ├── WorkerError                     exit 3 · a worker process failed
    │   ├── WorkerStartError            it did not come up
    │   │   └── WorkerOutOfMemory       because the kernel killed it for want of memory
    │   ├── WorkerLost                  it died or hung more often than restarts allow
    │   └── WireError                   a record between processes is damaged or out of order
    │       └── RecordTooLarge          a record is larger than the slot that should hold it
    └── RequestError                    an HTTP status · bad or refused request
        ├── InvalidField                400 invalid_field
        ├── SchemaUnsatisfiable         400 schema_unsatisfiable
        ├── ContextOverflow             400 context_overflow
        ├── UnknownModel                404 model_not_found
        ├── UnknownFlip                 404 flip_not_found
        ├── ModelNotLoaded              409 model_not_loaded
        ├── ModelInUse                  409 model_in_use
        ├── UnknownRoute                404 not_found
        ├── WrongMethod                 405 method_not_allowed
        ├── Unauthorized                401 unauthorized
        ├── Forbidden                   403 forbidden_host, forbidden_origin
        ├── FlipNotBegun                400 bad_target, 409 flip_running, already_there, single_rank, does_not_fit, ...
        ├── BodyTooLarge                413 body_too_large
        ├── QueueFull                   429 queue_full
        ├── RateLimited                 429 rate_limited
        ├── Draining                    503 draining
        ├── ModelWaits                  503 model_waits
        ├── ModelUnloaded               503 model_unloaded
        ├── ModelLoadFailed             500 model_load_failed
        ├── DoesNotFit                  507 does_not_fit
        ├── Loading                     503 loading
        ├── ReplicaLost                 503 replica_lost
        └── RequestFailed               500 server_error, with the request id only

`code` and `exit_code` stand at each class, the HTTP status at each kind of RequestError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class HomeserveError(Exception):
    """Root of the tree. `code` is a stable word for programs, `field` what it is about, `fix` what to do about it."""

    code = "error"
    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        self.message = message
        self.field = field
        self.fix = fix
        super().__init__(message)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "error": {"code": self.code, "message": self.message, "field": self.field, "fix": self.fix},
        }


class SettingError(HomeserveError):
    code = "setting"


class ModelError(HomeserveError):
    code = "model"


class ModelNotFound(ModelError):
    code = "model_not_found"


class InvalidModelFile(ModelError):
    """`path` is the file, `where` the place in it (a key, a tensor, a byte offset), `reason` what is wrong there."""

    code = "checkpoint"

    def __init__(self, path: str, where: str, what: str, *, fix: str | None = None) -> None:
        self.path = path
        self.where = where
        self.reason = what
        super().__init__(f"{path}: {where}: {what}", field=where, fix=fix)


WITHOUT_FILE = ("model", "model metadata")
"""Paths in errors of rooms that see a model's values and tensors, and not from which of its files they are."""


@contextmanager
def told_of(path: str) -> Iterator[None]:
    """Errors that name no file name `path`, the model's: for who opened it."""
    try:
        yield
    except InvalidModelFile as error:
        if error.path not in WITHOUT_FILE:
            raise
        raise InvalidModelFile(path, error.where, error.reason, fix=error.fix) from error


class UnknownArchitecture(ModelError):
    code = "unknown_architecture"

    def __init__(self, arch: str, known: tuple[str, ...]) -> None:
        self.arch = arch
        self.known = known
        super().__init__(
            f"architecture {arch!r} is not known; known: {', '.join(known)}",
            field="general.architecture",
            fix="use a model of a known architecture",
        )


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class BudgetError(HomeserveError):
    code = "budget"


class DeviceError(HomeserveError):
    code = "device"


class FetchError(HomeserveError):
    code = "fetch"


class WorkerError(HomeserveError):
    code = "worker"
    exit_code = 3


class WorkerStartError(WorkerError):
    code = "worker_start"


class WorkerOutOfMemory(WorkerStartError):
    """The kernel killed a worker for want of memory before it served."""

    code = "worker_out_of_memory"


class WorkerLost(WorkerError):
    code = "worker_lost"


class WireError(WorkerError):
    code = "wire"


class RecordTooLarge(WireError):
    """`record_bytes` is the encoded size, `slot_bytes` what a slot holds."""

    def __init__(self, record: str, record_bytes: int, slot_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.slot_bytes = slot_bytes
        super().__init__(f"{record} of {record_bytes} bytes is larger than a slot, which holds {slot_bytes} bytes")


TOLD_CHARS = 2000
"""Of a message, and of a field's path, to a client: both may repeat what it sent, which may be megabytes."""


class RequestError(HomeserveError):
    """What a client gets: `status`, and the OpenAI error body (`message, type, param, code`)."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"
    retry: bool | None = None
    """False: clients that send requests again by themselves are told not to."""

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        super().__init__(_shortened(message), field=None if field is None else _shortened(field), fix=fix)

    @property
    def param(self) -> str | None:
        return self.field

    def as_body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def _shortened(text: str) -> str:
    """Without its middle, where it is long."""
    half = TOLD_CHARS // 2
    return text if len(text) <= TOLD_CHARS else f"{text[:half]} … {text[-half:]}"


class InvalidField(RequestError):
    code = "invalid_field"

    def __init__(self, field: str, what: str, *, fix: str | None = None) -> None:
        super().__init__(f"{field}: {what}", field=field, fix=fix)


class SchemaUnsatisfiable(RequestError):
    """No answer could ever fit what `field` asks for."""

    code = "schema_unsatisfiable"

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}", field=field)


class ContextOverflow(RequestError):
    code = "context_overflow"

    def __init__(
        self, prompt_tokens: int, limit_tokens: int, field: str = "messages", *, at_least: bool = False
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens
        count = f"at least {prompt_tokens}" if at_least else f"{prompt_tokens}"
        super().__init__(
            f"the prompt has {count} tokens, the limit is {limit_tokens}: shorten it, or start the server with"
            " a larger --context or --kv-tokens",
            field=field,
        )


class UnknownModel(RequestError):
    status = 404
    type = "not_found_error"
    code = "model_not_found"

    def __init__(self, asked: str, served: tuple[str, ...]) -> None:
        super().__init__(f"model {asked!r} is not served here; there is: {', '.join(served)}", field="model")


class ModelNotLoaded(RequestError):
    """Something was asked of a model that has it only while it is in."""

    status = 409
    type = "conflict_error"
    code = "model_not_loaded"

    def __init__(self, asked: str | None, state: str) -> None:
        what = f"model {asked!r} is {state}" if asked is not None else "no model is loaded"
        super().__init__(f"{what}; a request for it, or POST /v1/homeserve/models/ID/load, loads it", field="model")


class ModelInUse(RequestError):
    """A model that somebody wants out computes, or is on its way in."""

    status = 409
    type = "conflict_error"
    code = "model_in_use"

    def __init__(self, asked: str, running: int) -> None:
        self.running = running
        what = f"computes {running} request{'s' * (running != 1)}" if running else "is being loaded"
        super().__init__(f'model {asked!r} {what}; {{"force": true}} ends that', field="force")

    def as_body(self) -> dict[str, Any]:
        body = super().as_body()
        body["error"]["running"] = self.running
        return body


class ModelWaits(RequestError):
    """The models that are in did not make room in time. `retry_after_s` goes out as the Retry-After header."""

    status = 503
    type = "server_error"
    code = "model_waits"

    def __init__(self, asked: str, others: str, waited_s: float, retry_after_s: int = 5) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"model {asked!r} is not loaded: its memory is held by {others}, and that was in use for {waited_s:g} s"
            f" (--model-wait-s); try again in {retry_after_s} s",
            field="model",
        )


class ModelUnloaded(RequestError):
    """Somebody took the model away from a request: its load was ended, or the request cut off. `retry_after_s` goes out
    as the Retry-After header."""

    status = 503
    type = "server_error"
    code = "model_unloaded"

    def __init__(self, asked: str, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"model {asked!r} was unloaded by hand; the next request loads it again", field="model")


class ModelLoadFailed(RequestError):
    """Sent again at once it would fail again, so clients are told not to."""

    status = 500
    type = "server_error"
    code = "model_load_failed"
    retry = False

    def __init__(self, asked: str, reason: str) -> None:
        super().__init__(f"model {asked!r} cannot be loaded: {reason}", field="model")


class DoesNotFit(RequestError):
    """The memory that models may have is too small for this one, even alone."""

    status = 507
    type = "server_error"
    code = "does_not_fit"
    retry = False

    def __init__(self, asked: str, reason: str) -> None:
        super().__init__(f"model {asked!r} does not fit: {reason}", field="model")


class UnknownFlip(RequestError):
    status = 404
    type = "not_found_error"
    code = "flip_not_found"

    def __init__(self, asked: str, kept: int) -> None:
        super().__init__(f"there is no flip {asked!r}; the last {kept} are kept: see /v1/homeserve/flip", field="id")


class FlipNotBegun(RequestError):
    """A flip that was asked for and cannot be now. `code` says why; `facts` are the numbers that decided, where there
    are any (`needed_mib`, `available_mib`, `device`)."""

    status = 409
    type = "conflict_error"

    def __init__(self, code: str, message: str, facts: dict[str, Any] | None = None) -> None:
        self.code = code
        self.facts = facts or {}
        if code == "bad_target":
            self.status, self.type = 400, "invalid_request_error"
        super().__init__(message, field="to" if code in ("bad_target", "already_there") else None)

    def as_body(self) -> dict[str, Any]:
        body = super().as_body()
        body["error"].update(self.facts)
        return body


class UnknownRoute(RequestError):
    status = 404
    type = "not_found_error"
    code = "not_found"

    def __init__(self, path: str) -> None:
        super().__init__(f"there is nothing at {path}; the API is under /v1")


class WrongMethod(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"{method} is not allowed here; use {' or '.join(allowed)}")
        self.allowed = allowed


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    code = "unauthorized"


class Forbidden(RequestError):
    """A request that a web page of somebody else may have made. `code` says by which mark: its host, its origin."""

    status = 403
    type = "permission_error"

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class QueueFull(RequestError):
    """`retry_after_s` goes out as the Retry-After header."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(
        self, waiting: int, retry_after_s: int = 1, *, why: str = "requests are waiting already (--max-waiting)"
    ) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{waiting} {why}; try again in {retry_after_s} s")


class RateLimited(RequestError):
    """`limit` is which one: requests, or tokens. `retry_after_s` goes out as the Retry-After header."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limited"

    def __init__(self, limit: str, per_minute: int, retry_after_s: int) -> None:
        self.limit = limit
        self.retry_after_s = retry_after_s
        what = f"{per_minute} {limit} a minute (--rate-limit-{limit})"
        super().__init__(f"this client has used up its {what}; try again in {retry_after_s} s")


class Draining(RequestError):
    status = 503
    type = "server_error"
    code = "draining"


class Loading(RequestError):
    """The model is still being loaded. `retry_after_s` goes out as the Retry-After header."""

    status = 503
    type = "server_error"
    code = "loading"

    def __init__(self, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__("the model is still being loaded; /health tells how far it is")


class ReplicaLost(RequestError):
    """Of several boxes: the one that computed the answer is gone, and no other one has taken over."""

    status = 503
    type = "server_error"
    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("the replica that computed this answer was lost; ask again")


class RequestFailed(RequestError):
    status = 500
    type = "server_error"
    code = "server_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} failed")
