"""`python -m hfai` is the `hfai` command."""

from hfai.cli import main

main()
