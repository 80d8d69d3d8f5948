"""resident."""
