"""Scenarios of the verdict: jobs with a known cause, and what the report must say about them."""
