"""GGUF and safetensors files as one Checkpoint view."""
