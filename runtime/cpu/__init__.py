"""The host as an execution device."""
