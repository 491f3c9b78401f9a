"""A word of the system for memory that Python has no name for. Values alone."""

from __future__ import annotations

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): have the system hold pages for writing, without touching what is in them."""
