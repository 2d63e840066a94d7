"""The command, as ``devplan`` and as a module: ``python -m devplan.devplan_cli``."""

import signal
import sys

# Until the command can answer an interrupt with a line, it ends the process as in any other program: in the
# tenths of a second in which Python imports the rest, it would print a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .early import begin_gpu


def main() -> None:
    """Begin what takes long, then run the command."""
    begin_gpu(sys.argv[1:])
    from .main import main as run

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
