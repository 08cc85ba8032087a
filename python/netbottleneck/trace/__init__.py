"""Run records as values, their file formats, and the reader of the ranks' ring files."""
