"""Models on disk: GGUF files and safetensors folders as one `Checkpoint`, and the names that people give them."""

from homeserve.checkpoint.opening import open
from homeserve.checkpoint.view import Checkpoint, TokenizerSource

__all__ = ["Checkpoint", "TokenizerSource", "open"]
