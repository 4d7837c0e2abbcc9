"""Facts about a target and a draft, from files on disk or on the hub. No torch here."""
