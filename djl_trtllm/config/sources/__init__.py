"""Where values come from: property files, the environment, arguments."""
