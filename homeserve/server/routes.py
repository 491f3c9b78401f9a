"""The table of routes. A new route is one entry here; its body, answers and errors are described from it."""

from __future__ import annotations

from homeserve.errors import ContextOverflow, FlipNotBegun, UnknownFlip, UnknownModel
from homeserve.server.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from homeserve.server.flip import ROUTE as FLIP
from homeserve.server.flip import FlipRequest, get_flip, get_flips, post_flip
from homeserve.server.health import get_health, get_metrics, get_ready, get_version
from homeserve.server.memory import get_budget, get_corridor
from homeserve.server.openai import get_model, get_models, post_chat_completions, post_completions
from homeserve.server.page import FILES, get_file
from homeserve.server.route import GENERATES, NEEDS_MODEL, READS_BODY, Answer, Route
from homeserve.server.status import get_census, get_status
from homeserve.server.tokens import post_detokenize, post_tokenize

ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/v1/models",
        get_models,
        "List the model that is served.",
        "OpenAI",
        answers=(Answer("The model, or none while it is being loaded."),),
    ),
    Route(
        "GET",
        "/v1/models/{id:.+}",
        get_model,
        "Tell of one model.",
        "OpenAI",
        answers=(Answer("The model."),),
        errors=(UnknownModel,),
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        post_chat_completions,
        "Answer a conversation.",
        "OpenAI",
        body=ChatRequest,
        answers=(Answer("The answer."),),
        errors=(*READS_BODY, ContextOverflow, UnknownModel, *GENERATES),
    ),
    Route(
        "POST",
        "/v1/completions",
        post_completions,
        "Continue a text.",
        "OpenAI",
        body=CompletionRequest,
        answers=(Answer("The continuation."),),
        errors=(*READS_BODY, ContextOverflow, UnknownModel, *GENERATES),
    ),
    Route(
        "POST",
        "/tokenize",
        post_tokenize,
        "Cut a text or a conversation into tokens.",
        "Tokens",
        body=TokenizeRequest,
        answers=(Answer("The tokens."),),
        errors=(*READS_BODY, ContextOverflow, UnknownModel, *NEEDS_MODEL),
    ),
    Route(
        "POST",
        "/detokenize",
        post_detokenize,
        "Join tokens to a text.",
        "Tokens",
        body=DetokenizeRequest,
        answers=(Answer("The text."),),
        errors=(*READS_BODY, UnknownModel, *NEEDS_MODEL),
    ),
    Route(
        "GET",
        "/health",
        get_health,
        "Say whether requests are taken.",
        "Server",
        answers=(Answer("They are."), Answer("They are not: loading, or draining.", status=503)),
    ),
    Route(
        "GET",
        "/ready",
        get_ready,
        "Say whether a request sent now is computed now.",
        "Server",
        answers=(Answer("It is."), Answer("It is not, or not at once.", status=503)),
    ),
    Route(
        "GET",
        "/metrics",
        get_metrics,
        "Count, for Prometheus.",
        "Server",
        answers=(Answer("Metrics in the text format.", kind="text/plain"),),
    ),
    Route("GET", "/version", get_version, "Tell the version.", "Server", answers=(Answer("The version."),)),
    Route(
        "GET",
        "/v1/homeserve/status",
        get_status,
        "Tell of the whole machine.",
        "Homeserve",
        answers=(Answer("The status."),),
    ),
    Route(
        "GET",
        "/v1/homeserve/census",
        get_census,
        "Count the pages of each rank and find those that nobody owns.",
        "Homeserve",
        answers=(Answer("The census."),),
        errors=NEEDS_MODEL,
    ),
    Route(
        "POST",
        FLIP,
        post_flip,
        "Begin a change of the layout.",
        "Homeserve",
        body=FlipRequest,
        answers=(Answer("Begun.", status=202),),
        errors=(*READS_BODY, FlipNotBegun, *NEEDS_MODEL),
    ),
    Route(
        "GET", FLIP, get_flips, "List the last flips.", "Homeserve", answers=(Answer("The flips."),), errors=NEEDS_MODEL
    ),
    Route(
        "GET",
        FLIP + "/{id}",
        get_flip,
        "Tell of one flip.",
        "Homeserve",
        answers=(Answer("The flip."),),
        errors=(UnknownFlip, *NEEDS_MODEL),
    ),
    Route(
        "GET",
        "/v1/homeserve/budget",
        get_budget,
        "Tell what memory was planned and what is held.",
        "Homeserve",
        answers=(Answer("The budget."),),
        errors=NEEDS_MODEL,
    ),
    Route(
        "GET",
        "/v1/homeserve/corridor",
        get_corridor,
        "Tell what memory stayed free.",
        "Homeserve",
        answers=(Answer("The corridor."),),
        errors=NEEDS_MODEL,
    ),
    *(
        Route("GET", path, get_file, f"Get {path} of the page.", "Page", answers=(Answer("The file.", kind=kind),))
        for path, (_, kind) in FILES.items()
    ),
)
