"""Recurrent target layers (Gated DeltaNet): the recurrence, and its replay after a partly accepted block."""
