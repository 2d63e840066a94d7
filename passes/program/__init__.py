"""Passes over whole programs."""
