"""`python -m extproc.cli` is `inferact`."""

from extproc.cli import main

main()
