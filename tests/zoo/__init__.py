"""The zoo: many models through the whole tool, and a table of how far each comes (`python -m tests.zoo`)."""
