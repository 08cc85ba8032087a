"""Run records as values, their file formats, and the reader of the rings that ranks write."""
