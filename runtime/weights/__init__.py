"""Weights from files at load, where an artifact says how to make its constants."""
