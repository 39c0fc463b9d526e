"""`python -m tools.bench NAME`: one JSON record, with the machine and the peer's figure from the same run beside ours."""
