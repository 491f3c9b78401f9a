"""Facts about a box and a model, turned into a memory plan."""

OWNER = "homeserve"
