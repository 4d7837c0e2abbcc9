"""Recurrent target layers (Gated DeltaNet): the recurrence, and replay after partial acceptance."""
