"""Ops as launches: one module for each kind of op, each with the same two functions.

    scratch(op, context)                 bytes of memory that the op needs beside its buffers, by name
    launches(op, places, shape, planes)  what has to run for a batch of that shape

Both are functions of their arguments alone. What differs from batch to batch in more than its shape lies in the card's
memory (`Places.batch`), so that the launches of equal shapes are equal, and can be recorded once.

`planes` (of `base.quantised`, or None): where the op puts its result quantised as well, for a Linear that follows it
and reads that (Norm, GatedActivation, DeltaNet); of a Linear, or Experts, where its source lies so already. None:
nowhere.

Scratch belongs to the op while its launches run, so ops may share names; the quantised planes alone outlive the op that
writes them. Ops that keep rows of held lanes (steps/recurrent.py) have two functions more:

    kept(op)                             floats that are kept of a held row: (first array, second array) of Places.kept
    accepts(op, places, count)           launches for `count` held lanes (Places.batch("accepts"))
"""
