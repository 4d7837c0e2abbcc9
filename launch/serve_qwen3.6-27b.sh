#!/usr/bin/env bash
# Qwen3.6-27B and its DFlash draft, by the command of its model card.
# TARGET and DRAFT name other checkpoints or folders, PYTHON another interpreter. Further arguments
# go to SGLang; for long contexts, --speculative-dflash-draft-window-size WINDOW_SIZE.
set -euo pipefail
exec "${PYTHON:-python}" -m sglang.launch_server \
    --model-path "${TARGET:-Qwen/Qwen3.6-27B}" \
    --speculative-algorithm DFLASH \
    --speculative-draft-model-path "${DRAFT:-z-lab/Qwen3.6-27B-DFlash}" \
    --speculative-num-draft-tokens 16 \
    --tp-size 1 \
    --attention-backend fa3 \
    --mem-fraction-static 0.75 \
    --mamba-scheduler-strategy extra_buffer \
    --trust-remote-code \
    "$@"
