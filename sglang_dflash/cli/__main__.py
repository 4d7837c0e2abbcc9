"""`python -m sglang_dflash.cli`."""

import sys

from sglang_dflash.cli import main

sys.exit(main())
