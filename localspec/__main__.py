"""Run the command line as `python -m localspec`, without the installed script."""

from __future__ import annotations

import sys

from localspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
