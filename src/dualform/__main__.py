"""`python -m dualform`: the command line, where its script is not installed."""

from dualform.cli import main

if __name__ == "__main__":
    main()
