"""Time, measured or modeled."""
