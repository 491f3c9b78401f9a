"""Measuring a server over its HTTP API, as users get it: what `homeserve bench` and `scripts/bench` have in common."""
