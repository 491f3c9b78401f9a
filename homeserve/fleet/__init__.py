"""Worker processes: spawn, handshake, run a plan, death, restart."""
