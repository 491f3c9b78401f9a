"""The table of routes. A new route is one entry here; its body, answers and errors are described from it."""

from __future__ import annotations

from homeserve.errors import (
    ContextOverflow,
    Draining,
    FlipNotBegun,
    InvalidField,
    Loading,
    ModelInUse,
    ModelNotLoaded,
    RequestFailed,
    SchemaUnsatisfiable,
    UnknownFlip,
    UnknownModel,
)
from homeserve.server.answer_schemas import (
    AnthropicError,
    ChatAnswer,
    ChatChunk,
    Error,
    Model,
    Models,
    Text,
    TextAnswer,
    TextChunk,
    Tokens,
)
from homeserve.server.embeddings import post_embeddings
from homeserve.server.embeddings_fields import Embeddings, EmbeddingsRequest
from homeserve.server.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from homeserve.server.flip import ROUTE as FLIP
from homeserve.server.flip import FlipRequest, get_flip, get_flips, post_flip
from homeserve.server.health import get_health, get_metrics, get_ready, get_version
from homeserve.server.machine_schemas import (
    Budget,
    Census,
    Corridor,
    Flip,
    FlipBegun,
    Flips,
    Health,
    Introduction,
    ModelChange,
    NotHealthy,
    Ready,
    Status,
    Version,
)
from homeserve.server.memory import get_budget, get_corridor
from homeserve.server.messages import post_count_tokens, post_messages
from homeserve.server.messages_errors import MESSAGES
from homeserve.server.messages_fields import CountTokensRequest, MessagesRequest
from homeserve.server.messages_schemas import (
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageAnswer,
    MessageEnd,
    MessagePing,
    MessageStart,
    MessageStop,
    TokensCount,
)
from homeserve.server.models import MODELS, UnloadRequest, get_model, get_models, post_load, post_unload
from homeserve.server.openai import post_chat_completions, post_completions
from homeserve.server.openapi import get_openapi
from homeserve.server.page import FILES, get_file
from homeserve.server.responses import post_input_tokens, post_responses
from homeserve.server.responses_fields import InputTokensRequest, ResponsesRequest
from homeserve.server.responses_schemas import RESPONSE_EVENTS, InputTokens, Response
from homeserve.server.route import GENERATES, LEASES, LOOKS, READS_BODY, Answer, ErrorShape, Route, Stream
from homeserve.server.status import get_census, get_status
from homeserve.server.tokens import post_detokenize, post_tokenize

_DONE = "The last event is `[DONE]`. An answer that fails on its way ends with an error."
_UNCHANGED = Answer("`If-None-Match` has the tag of what is here.", status=304, kind="")

ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/v1/models",
        get_models,
        "List the models, in and out.",
        "OpenAI",
        answers=(Answer("The models; of one model none until it is loaded.", Models),),
    ),
    Route(
        "GET",
        "/v1/models/{id:.+}",
        get_model,
        "Tell of one model.",
        "OpenAI",
        answers=(Answer("The model.", Model),),
        errors=(UnknownModel,),
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        post_chat_completions,
        "Answer a conversation.",
        "OpenAI",
        body=ChatRequest,
        answers=(Answer("The answer.", ChatAnswer),),
        stream=Stream(f"Chunks of the answer. {_DONE}", {"": (ChatChunk, Error)}),
        errors=(*READS_BODY, ContextOverflow, *GENERATES),
    ),
    Route(
        "POST",
        "/v1/completions",
        post_completions,
        "Continue a text.",
        "OpenAI",
        body=CompletionRequest,
        answers=(Answer("The continuation.", TextAnswer),),
        stream=Stream(f"Chunks of the continuation. {_DONE}", {"": (TextChunk, Error)}),
        errors=(*READS_BODY, ContextOverflow, *GENERATES),
    ),
    Route(
        "POST",
        "/v1/embeddings",
        post_embeddings,
        "Tell what texts are about, as vectors of length 1.",
        "OpenAI",
        body=EmbeddingsRequest,
        answers=(Answer("The embeddings.", Embeddings),),
        errors=(*READS_BODY, ContextOverflow, *LEASES, RequestFailed),
    ),
    Route(
        "POST",
        "/v1/responses",
        post_responses,
        "Answer a conversation, of which nothing is kept.",
        "OpenAI",
        body=ResponsesRequest,
        answers=(Answer("The response.", Response),),
        stream=Stream("The last event says how it ended: completed, incomplete or failed.", RESPONSE_EVENTS),
        errors=(*READS_BODY, ContextOverflow, SchemaUnsatisfiable, *GENERATES),
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        post_input_tokens,
        "Count the tokens of a conversation.",
        "OpenAI",
        body=InputTokensRequest,
        answers=(Answer("The count.", InputTokens),),
        errors=(*READS_BODY, ContextOverflow, *LEASES),
    ),
    Route(
        "POST",
        MESSAGES,
        post_messages,
        "Answer a conversation, as Anthropic's API does.",
        "Anthropic",
        body=MessagesRequest,
        answers=(Answer("The answer.", MessageAnswer),),
        stream=Stream(
            "The answer as content blocks, one after the other. An answer that fails on its way ends with `error`.",
            {
                "message_start": (MessageStart,),
                "content_block_start": (BlockStart,),
                "content_block_delta": (BlockDelta,),
                "content_block_stop": (BlockStop,),
                "message_delta": (MessageEnd,),
                "message_stop": (MessageStop,),
                "ping": (MessagePing,),
                "error": (AnthropicError,),
            },
        ),
        errors=(*READS_BODY, ContextOverflow, *GENERATES),
        error_shape=ErrorShape.ANTHROPIC,
    ),
    Route(
        "POST",
        f"{MESSAGES}/count_tokens",
        post_count_tokens,
        "Count the tokens of a conversation.",
        "Anthropic",
        body=CountTokensRequest,
        answers=(Answer("The count.", TokensCount),),
        errors=(*READS_BODY, ContextOverflow, *LEASES),
        error_shape=ErrorShape.ANTHROPIC,
    ),
    Route(
        "POST",
        "/tokenize",
        post_tokenize,
        "Cut a text or a conversation into tokens.",
        "Tokens",
        body=TokenizeRequest,
        answers=(Answer("The tokens.", Tokens),),
        errors=(*READS_BODY, ContextOverflow, *LEASES),
    ),
    Route(
        "POST",
        "/detokenize",
        post_detokenize,
        "Join tokens to a text.",
        "Tokens",
        body=DetokenizeRequest,
        answers=(Answer("The text.", Text),),
        errors=(*READS_BODY, *LEASES),
    ),
    Route(
        "GET",
        "/health",
        get_health,
        "Say whether requests are taken.",
        "Server",
        answers=(Answer("They are.", Health), Answer("They are not: loading, or draining.", NotHealthy, status=503)),
    ),
    Route(
        "GET",
        "/ready",
        get_ready,
        "Say whether a request sent now is computed now.",
        "Server",
        answers=(Answer("It is.", Ready), Answer("It is not, or not at once.", NotHealthy, status=503)),
    ),
    Route(
        "GET",
        "/metrics",
        get_metrics,
        "Count, for Prometheus.",
        "Server",
        answers=(Answer("Metrics in the text format.", kind="text/plain"),),
    ),
    Route("GET", "/version", get_version, "Tell the version.", "Server", answers=(Answer("The version.", Version),)),
    Route(
        "GET",
        "/v1/homeserve/status",
        get_status,
        "Tell of the whole machine, and of one model that is in.",
        "Homeserve",
        answers=(Answer("The status.", Status),),
        errors=(InvalidField, UnknownModel, ModelNotLoaded),
    ),
    Route(
        "GET",
        "/v1/homeserve/census",
        get_census,
        "Count the pages of each rank and find those that nobody owns.",
        "Homeserve",
        answers=(Answer("The census.", Census),),
        errors=LOOKS,
    ),
    Route(
        "POST",
        MODELS + "/{id:.+}/load",
        post_load,
        "Load a model.",
        "Homeserve",
        answers=(Answer("It is in.", ModelChange), Answer("It comes in.", ModelChange, status=202)),
        errors=(UnknownModel, Loading, Draining),
    ),
    Route(
        "POST",
        MODELS + "/{id:.+}/unload",
        post_unload,
        "Unload a model.",
        "Homeserve",
        body=UnloadRequest,
        bare=True,
        answers=(Answer("It is out.", ModelChange), Answer("It goes out.", ModelChange, status=202)),
        errors=(*READS_BODY, UnknownModel, ModelInUse, Loading, Draining),
    ),
    Route(
        "POST",
        FLIP,
        post_flip,
        "Begin a change of the layout.",
        "Homeserve",
        body=FlipRequest,
        answers=(Answer("Begun.", FlipBegun, status=202, headers={"Location": "Where to read what becomes of it."}),),
        errors=(*READS_BODY, FlipNotBegun, *LOOKS),
    ),
    Route(
        "GET",
        FLIP,
        get_flips,
        "List the last flips.",
        "Homeserve",
        answers=(Answer("The flips.", Flips),),
        errors=LOOKS,
    ),
    Route(
        "GET",
        FLIP + "/{id}",
        get_flip,
        "Tell of one flip.",
        "Homeserve",
        answers=(Answer("The flip.", Flip),),
        errors=(UnknownFlip, *LOOKS),
    ),
    Route(
        "GET",
        "/v1/homeserve/budget",
        get_budget,
        "Tell what memory was planned and what is held.",
        "Homeserve",
        answers=(Answer("The budget.", Budget),),
        errors=LOOKS,
    ),
    Route(
        "GET",
        "/v1/homeserve/corridor",
        get_corridor,
        "Tell what memory stayed free.",
        "Homeserve",
        answers=(Answer("The corridor.", Corridor),),
        errors=LOOKS,
    ),
    Route("GET", "/openapi.json", get_openapi, "Describe the API.", "Server", answers=(Answer("OpenAPI 3.1.", dict),)),
    Route(
        "GET",
        "/",
        get_file,
        "Get the page, or what a program needs to know first.",
        "Page",
        answers=(Answer("The page; JSON where only that is accepted.", Introduction, also=("text/html",)), _UNCHANGED),
    ),
    *(
        Route("GET", path, get_file, "Get a file of the page.", "Page", answers=(Answer("It.", kind=kind), _UNCHANGED))
        for path, (_, kind) in FILES.items()
        if path != "/"
    ),
)
