"""The worker: prefill, and the decode step of propose, verify and commit."""
