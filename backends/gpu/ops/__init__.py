"""Symbols of the device code, and the launches that run them, op by op."""
