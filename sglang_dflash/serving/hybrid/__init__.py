"""Rollback of the target's recurrent states to an accepted prefix."""
