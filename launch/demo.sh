#!/usr/bin/env bash
# Plain decoding and DFLASH side by side on a demo pair:
# bash launch/demo.sh [--model smollm2|dense|hybrid] [--check]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ""
exec python -W ignore -m launch.demo.main "$@"
