"""Memory and movement. Knows programs, units and ranks; knows nothing of FX."""
