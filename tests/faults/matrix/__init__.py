"""The faults matrix: ranks that sum, what is done to them, and what must come of it."""
