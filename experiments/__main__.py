"""`python -m experiments EXPERIMENT [options]`; `--help` lists them."""

import sys

from experiments.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
