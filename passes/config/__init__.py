"""What an export is told: TOML files and flags, their settings, and where each value came from."""
