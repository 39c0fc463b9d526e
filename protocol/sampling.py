"""Coupled sampling, to the bit: the one specification that the target and every drafter follow (NumPy)."""
