"""Measuring an artifact: latency, memory, cold start, traces, and the choice of algorithms."""
