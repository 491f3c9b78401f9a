"""Tokens to text and back: tokenizer, detokenizer, chat templates, stop strings."""
