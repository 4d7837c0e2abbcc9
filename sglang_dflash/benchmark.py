"""The published benchmark command, `python -m sglang_dflash.benchmark`: see `bench.published`."""

import sys

from sglang_dflash.tools.bench.published import main

if __name__ == "__main__":
    sys.exit(main())
