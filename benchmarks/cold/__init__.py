"""Cold starts: a server with a latency, one start of a file behind it, and the page."""
