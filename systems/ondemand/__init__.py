"""ondemand."""
