"""How recurrent states of the target follow an accepted prefix."""
