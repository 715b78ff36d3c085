"""`python -m penstock`: the command, where no script of its name is installed."""

from penstock.cli import main

main()
