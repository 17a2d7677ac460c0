"""The command line: parse, ask the memory, render. Stdout is the result, stderr the progress and the errors.

Exit status: 0, 1 for a failure (or a verification that did not pass), 2 for wrong usage. Nothing heavy is imported
before a command runs, so that `--help` is instant. A module holds a group of commands; `application` lists them all.
"""

from dualform.cli.application import app, main

__all__ = ["app", "main"]
