"""The engine: request state and every decision."""
