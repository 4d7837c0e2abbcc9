#!/usr/bin/env bash
# Qwen3.5-35B-A3B and its DFlash draft, by the command of its model card.
# TARGET and DRAFT name other checkpoints or folders, PYTHON another interpreter. Further arguments
# go to SGLang; for long contexts, --speculative-dflash-draft-window-size WINDOW_SIZE.
set -euo pipefail
export SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1
exec "${PYTHON:-python}" -m sglang.launch_server \
    --model-path "${TARGET:-Qwen/Qwen3.5-35B-A3B}" \
    --speculative-algorithm DFLASH \
    --speculative-draft-model-path "${DRAFT:-z-lab/Qwen3.5-35B-A3B-DFlash}" \
    --speculative-num-draft-tokens 16 \
    --tp-size 1 \
    --attention-backend trtllm_mha \
    --speculative-draft-attention-backend fa4 \
    --mem-fraction-static 0.75 \
    --mamba-scheduler-strategy extra_buffer \
    --trust-remote-code \
    "$@"
