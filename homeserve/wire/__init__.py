"""The records that cross a process, their codec, and the rings that carry them."""
