"""Run the command as a module: ``python -m devplan.devplan_cli``."""

from .main import main

if __name__ == "__main__":
    main()
