"""Inside a worker process."""
