"""A run in several processes: the protocol, what carries it, and both of its sides."""
