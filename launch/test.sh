#!/usr/bin/env bash
# The whole test suite in .venv: bash launch/test.sh [pytest arguments]. In two processes (see tests/conftest.py).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "[dev]"
cd "$root"
# As the plain-CPU platform does: a core that the threads of small matrix products spin on is taken from the processes beside.
cores="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 1 ? cores - 1 : 1))}"
exec python -W ignore -m pytest -n 2 "$@"
