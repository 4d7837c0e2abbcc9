"""Files of a checkpoint on disk or on the hub: configs, tensors from headers. No torch here."""
