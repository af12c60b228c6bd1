"""`python -m offdrift` is the command line."""

from offdrift.cli import main

main()
