"""DFlash over Transformers, as z-lab's model cards show it: two names differ.

    python examples/transformers_generate.py
    python examples/transformers_generate.py --target Qwen/Qwen3-8B \
        --draft z-lab/Qwen3-8B-DFlash-b16 --device cuda:0
"""

from __future__ import annotations

import argparse
import os
import time

# Before torch is imported, as in `sglang-dflash generate`: threads that wait for one another sleep.
# On a busy CPU a small model is many times slower otherwise.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash import DFlashDraftModel
from sglang_dflash.tools.demo_pairs.pairs import demo_pair


def main() -> None:
    demo = demo_pair("dense")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(demo.target))
    parser.add_argument("--draft", default=str(demo.draft))
    parser.add_argument("--device", default="auto", help="as torch names it (default: auto)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", default=demo.prompts[0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    draft = DFlashDraftModel.from_pretrained(
        args.draft, trust_remote_code=True, dtype=args.dtype, device_map=args.device
    ).eval()
    # With `pip install accelerate`, device_map works here too.
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
    target = target.to(draft.device)
    tokenizer = AutoTokenizer.from_pretrained(args.target)

    messages = [{"role": "user", "content": args.prompt}]
    input_ids = tokenizer.apply_chat_template(
        messages,
        return_tensors="pt",
        return_dict=True,
        add_generation_prompt=True,
        enable_thinking=False,
    )["input_ids"].to(draft.device)

    began = time.perf_counter()
    output = draft.spec_generate(
        input_ids=input_ids,
        max_new_tokens=args.max_new_tokens,
        temperature=0.0,
        target=target,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    seconds, new = time.perf_counter() - began, output[0, input_ids.shape[1] :]
    print(tokenizer.decode(new))
    print(f"{len(new)} tokens, {len(new) / seconds:.1f} tokens/s, prefill included")


if __name__ == "__main__":
    main()
