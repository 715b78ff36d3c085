"""The command line. `main` is what the `penstock` command runs."""

from penstock.cli.app import main

__all__ = ["main"]
