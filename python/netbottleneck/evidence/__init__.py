"""What a study has found: each cell's facts, the chain of claims that they bear out or not, figures and a page."""
