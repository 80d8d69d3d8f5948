"""The version, where everything below the roof can read it."""

__version__ = "0.1.0"
