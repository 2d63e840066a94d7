"""Plan memory for a program. Pure Python and NumPy, without torch."""
