"""Developer tools, run from the repository: `python -m tools.NAME`. None of them is part of the package."""
