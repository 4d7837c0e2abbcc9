"""Tokens that come from elsewhere than a forward of this server's target."""
