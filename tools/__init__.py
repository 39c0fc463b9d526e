"""Commands that run from a checkout: export, wan, demo, bench."""
