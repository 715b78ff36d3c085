"""The command line; the `penstock` command runs `main`."""

from penstock.cli.app import main as main
