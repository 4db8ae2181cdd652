"""The live page: what runs, waits and has just ended, as a browser shows it."""
