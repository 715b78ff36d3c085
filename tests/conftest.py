"""Makes this folder importable, so that tests may share the builders that lie in it."""
