"""Rules between options."""
