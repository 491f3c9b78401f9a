"""The usual formats of thoughts and tool calls of each family, for checkpoints that bring no chat template.

Names are those of `homeserve.text.dialects`; an empty one says that the family has no such format.
"""

from __future__ import annotations

USUAL: dict[str, tuple[str, str]] = {
    "gemma2": ("", ""),
    "gemma3": ("", ""),
    "gemma4": ("channel-tags", "call-braces"),
    "gpt-oss": ("channels", "channels"),
    "llama": ("", ""),
    "qwen2": ("", "tagged-json"),
    "qwen2moe": ("", "tagged-json"),
    "qwen3": ("think-tags", "tagged-json"),
    "qwen3moe": ("think-tags", "tagged-json"),
    "qwen3next": ("think-tags", "tagged-json"),
    "qwen35": ("think-tags", "function-tags"),
    "qwen35moe": ("think-tags", "function-tags"),
}
"""Architecture -> (thought form, call form). Many models have the architecture `llama`: nothing is usual there."""
