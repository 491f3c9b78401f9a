"""What every handler needs, in one place: the context, the decoder, the metrics, and the checks of the state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from homeserve.errors import Draining, Loading, UnknownModel
from homeserve.server.bodies import BodyDecoder
from homeserve.server.bounds import Bounds
from homeserve.server.context import ModelInfo, ServerContext, State
from homeserve.server.held import Held
from homeserve.server.metrics import Metrics
from homeserve.text.dialects import NO_DIALECT, Dialect

if TYPE_CHECKING:
    from homeserve.engine.engine import Engine
    from homeserve.text.grammars import GrammarHost
    from homeserve.text.templates import TemplateHost
    from homeserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Served:
    """The parts of a loaded model, none of them None."""

    model: ModelInfo
    engine: Engine
    tokenizer: Tokenizer
    templates: TemplateHost
    grammars: GrammarHost
    dialect: Dialect
    """How the model writes thoughts and calls."""

    @property
    def bounds(self) -> Bounds:
        """A tokenizer may know more tokens than the model has rows for (added ones), or fewer (padding)."""
        limits = self.engine.limits
        vocab = min(self.model.vocab or self.tokenizer.vocab_size, self.tokenizer.vocab_size)
        return Bounds(vocab, self.engine.token_limit, limits.running + limits.waiting)


@dataclass
class Parts:
    """Shared by the handlers of one application."""

    context: ServerContext
    decoder: BodyDecoder = field(default_factory=BodyDecoder)
    metrics: Metrics = field(default_factory=Metrics)
    embeddings: Held = field(default_factory=Held)

    def served(self) -> Served:
        """The loaded model. Raises Loading."""
        context = self.context
        model, engine, tokenizer, templates = context.model, context.engine, context.tokenizer, context.templates
        if context.state() == State.LOADING.value or model is None or engine is None:
            raise Loading()
        grammars = context.grammars
        if tokenizer is None or templates is None or grammars is None:
            raise Loading()
        return Served(model, engine, tokenizer, templates, grammars, context.dialect or NO_DIALECT)

    def taking_requests(self) -> Served:
        """The loaded model, if new work is taken. Raises Loading, Draining."""
        if self.context.state() == State.DRAINING.value:
            raise Draining("the server is shutting down and takes no new requests")
        return self.served()


PARTS = web.AppKey("parts", Parts)


def check_model(asked: str | None, served: Served) -> None:
    """Raises UnknownModel. A request that names no model gets the one that is here."""
    if asked and asked != served.model.id:
        raise UnknownModel(asked, (served.model.id,))
