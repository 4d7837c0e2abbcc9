"""`python -m sglang_dflash`."""

import sys

from sglang_dflash.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
