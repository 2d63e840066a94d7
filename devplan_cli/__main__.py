"""The command, as ``devplan`` and as a module: ``python -m devplan.devplan_cli``."""

import sys

from .early import begin_gpu


def main() -> None:
    """Begin what takes long, then run the command."""
    begin_gpu(sys.argv[1:])
    from .main import main as run

    run()


if __name__ == "__main__":
    main()
