"""`python -m hadron`."""

from hadron.cli.main import main

main()
