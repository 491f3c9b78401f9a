"""homeserve: an LLM server for the box you have at home."""

__version__ = "0.1.0"
