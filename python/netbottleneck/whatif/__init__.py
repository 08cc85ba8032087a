"""What-if simulation: costs fitted to a run, its trace under other settings, and the questions asked of it."""
