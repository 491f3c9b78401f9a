"""Ops as launches: one module for each kind of op, each with the same two functions.

    scratch(op, context)                 bytes of memory that the op needs beside its buffers, by name
    launches(op, places, shape, planes)  what has to run for a batch of that shape

Both are functions of their arguments alone. What differs from batch to batch in more than its shape lies in the card's
memory (`Places.batch`), so that the launches of equal shapes are equal, and can be recorded once.
"""
