"""Pluggable compute backends behind one seam (`backends.base`)."""

OWNER = "homeserve"
