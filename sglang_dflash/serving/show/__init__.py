"""What is counted, warned of and shown."""
