"""Passes over exported methods that compute the same with less."""
