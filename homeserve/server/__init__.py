"""HTTP: routes, OpenAI JSON, streaming, metrics, the page."""
