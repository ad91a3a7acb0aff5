"""`python -m hadron`."""

from hadron.cli.main import main

if __name__ == "__main__":
    main()
