"""Drafters: small models behind one interface (`edge.drafters.base`)."""
