"""A conversation in the terminal: `conversation` is what was said, `orders` what a line may ask for, `client` speaks to
the server, `screen` shows, `line` reads, `session` joins them."""
