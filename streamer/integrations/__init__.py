"""streamer inside other frameworks. Each module imports its framework, and nothing imports them."""
