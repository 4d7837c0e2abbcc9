"""Scripts that write committed files. They are not in the wheel."""
