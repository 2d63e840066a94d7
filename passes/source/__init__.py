"""The user's model: SOURCE resolved, their file imported, their words about methods and weights."""
