"""Edge0: a trained prerouter chooses the next token's experts, and that choice is the routing."""
