"""What processes with the fake do; run as modules, with the fake installed."""
