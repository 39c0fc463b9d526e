"""The digital twin: the real window, policies, ledger and scheduler on a virtual clock."""
