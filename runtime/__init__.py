"""Load and run an artifact. Imports neither torch nor the planner."""
