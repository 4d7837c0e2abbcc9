"""Training of the embedded demo pairs: data, target, drafter, model card."""
