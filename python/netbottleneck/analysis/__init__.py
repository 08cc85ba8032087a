"""Trace analysis: pure functions from a trace to steps, layers, findings and a verdict."""
