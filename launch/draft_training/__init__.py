"""Training of a draft: text that the target writes, hidden states, weights, card."""
