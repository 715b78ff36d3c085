"""Many processes as one run: starting them, and keeping it whole when some are lost."""
