"""The board's runtime: it drafts ahead and shows only what a verifier has certified."""
