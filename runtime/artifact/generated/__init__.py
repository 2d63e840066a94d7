"""Code made from the schemas; see `generate.py`."""
