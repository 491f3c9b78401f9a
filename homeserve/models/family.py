"""What an architecture module exports: one `Family`, a name and its pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from homeserve.models.config import ModelConfig
from homeserve.models.stages import Stage


@dataclass(frozen=True)
class Family:
    """An architecture as declarations.

    config_from(metadata) -> ModelConfig             raises InvalidModelFile with the key, or UnsupportedModel
    stage_facts(config, layer) -> stages             of the layer at a *global* index; the one source of truth
    tensor_names(config, layer) -> {role: tensor}    every tensor that the layer may have, required or optional
    nextn_facts(config, index) -> stages             of the drafting block at `index` behind the trunk, where a family
                                                     has some (its tensors: those of block `config.layers + index`)
    ignored                                          last parts of layer tensors that carry nothing needed to compute
    """

    name: str
    config_from: Callable[[Mapping[str, object]], ModelConfig]
    stage_facts: Callable[[ModelConfig, int], tuple[Stage, ...]]
    tensor_names: Callable[[ModelConfig, int], Mapping[str, str]]
    nextn_facts: Callable[[ModelConfig, int], tuple[Stage, ...]] | None = None
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for need in ("config_from", "stage_facts", "tensor_names"):
            if not callable(getattr(self, need)):
                raise TypeError(f"model family {self.name!r} lacks {need}")

    def stages(self, config: ModelConfig, layer: int) -> tuple[Stage, ...]:
        """Of a layer of the trunk, or of a drafting block behind it."""
        if layer < config.layers:
            return self.stage_facts(config, layer)
        assert self.nextn_facts is not None, f"{self.name} has no drafting blocks"
        return self.nextn_facts(config, layer - config.layers)
