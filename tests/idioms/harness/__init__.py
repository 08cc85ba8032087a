"""The runner of the idioms: modes, rank processes, records, comparison and the table."""
