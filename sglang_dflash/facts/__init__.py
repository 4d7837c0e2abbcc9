"""What files on disk or on the hub say about a target and a draft. No torch here."""
