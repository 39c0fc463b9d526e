"""Releases of models, runtimes and settings: announced, fetched, tried and committed, or rolled back."""
