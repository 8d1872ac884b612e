"""`python -m hyper_mpmd`: the same as the command `hyper-mpmd`."""

from hyper_mpmd.cli import main

main()
