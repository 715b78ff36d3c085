"""`python -m penstock`: the command, if its script is not installed."""

from penstock.cli import main

main()
