"""Who holds which expert: byte ledger, tiers of slots, eviction policies."""
