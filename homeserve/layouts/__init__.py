"""How weights, KV rows and states are spread over ranks."""
