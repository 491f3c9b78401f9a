"""What the template host and its helper process say to each other, as `homeserve.text.helper_wire` has it: a `Setup`,
then one `Rendered` for each `Render`."""

from __future__ import annotations

from typing import Any

import msgspec

from homeserve.text.helper_wire import Bounds


class Setup(Bounds, kw_only=True):
    """Sent once. `output_chars_max`: characters of one text."""

    templates: dict[str, str]
    output_chars_max: int


class Render(msgspec.Struct):
    template: str
    context: dict[str, Any]


class Rendered(msgspec.Struct):
    """`text`, or `error`: why there is none."""

    text: str | None = None
    error: str | None = None
