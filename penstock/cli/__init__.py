"""The command line, which `main` runs."""

from penstock.cli.app import main as main
