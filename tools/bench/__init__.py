"""`python -m tools.bench NAME`: one JSON record, with the peer's figure from the same run beside ours."""
