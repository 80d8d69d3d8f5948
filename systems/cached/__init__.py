"""cached."""
