"""``streamer bench``: what this machine can do, stage by stage, and what a push makes of it."""
