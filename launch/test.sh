#!/usr/bin/env bash
# The whole test suite in .venv, in two processes (see tests/conftest.py):
# bash launch/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "[dev]"
cd "$root"
# As the plain-CPU platform does: threads of small matrix products that spin on a core take it from
# the other processes.
cores="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 1 ? cores - 1 : 1))}"
exec python -W ignore -m pytest -n 2 "$@"
