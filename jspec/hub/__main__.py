"""Command line of the model files: `python -m jspec.hub fetch` and `path`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jspec import hub
from jspec.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jspec.hub", description=hub.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help=f"download {hub.DEFAULT_MODEL} to the models directory")
    path = commands.add_parser("path", help="print where a model's files are")
    path.add_argument("name", nargs="?", default=hub.DEFAULT_MODEL)
    options = parser.parse_args(arguments)
    try:
        if options.command == "fetch":
            hub.fetch()
        else:
            print(hub.locate(options.name))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
