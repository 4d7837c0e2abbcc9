#!/usr/bin/env bash
# The whole test suite in .venv: bash launch/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "[dev]"
cd "$root"
exec python -W ignore -m pytest "$@"
